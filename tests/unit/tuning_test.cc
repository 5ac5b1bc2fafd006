// Files that HEDDLE_TUNING may name: what they change, and what a bad one is told. No GPU is asked.
#include "cuda/common/tuning.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "core/check.h"
#include "heddle/error.h"
#include "unit/deep_json.h"

namespace heddle::cuda {
namespace {

class TuningFile : public ::testing::Test {
 protected:
  const std::string path = ::testing::TempDir() + "heddle_tuning_" + std::to_string(getpid()) + ".json";

  ~TuningFile() override { std::remove(path.c_str()); }

  static constexpr const char* kVersion = "0.1";

  Tuning read(const std::string& content) const {
    std::ofstream(path) << content;
    return read_tuning(path, measured_costs(), kVersion);
  }
  // A whole file with these costs, which begin on line 2.
  static std::string with_kernels(const std::string& kernels, const std::string& version = kVersion) {
    return R"({"schema": 1, "gpu": {"name": "any", "compute_capability": "9.0", "multiprocessors": 132}, )"
           R"("version": ")" +
           version + "\",\n\"kernels\": " + kernels + "}";
  }
  // The error without its frame, which is checked.
  std::string refusal(const std::string& content) const {
    try {
      read(content);
    } catch (const Error& error) {
      return unframed(error.what());
    }
    return "nothing was refused";
  }
  std::string unframed(const std::string& what) const {
    const std::string before = "[heddle] HEDDLE_TUNING is " + path + ": ", after = "; `heddle tune` writes such a file";
    if (!what.starts_with(before) || !what.ends_with(after)) return "no frame: " + what;
    return what.substr(before.size(), what.size() - before.size() - after.size());
  }
  static const Cost& cost(const CostTable& table, std::string_view name) {
    for (const NamedCost& line : table) {
      if (line.name == name) return line.cost;
    }
    throw RuntimeError("no such line");
  }
};

TEST_F(TuningFile, ChangesWhatItNamesAndNothingElse) {
  const Tuning file = read(with_kernels(R"({
    "sm90 d64": {"fixed": 0, "flops": 1e12},
    "sm90_decode": {"bytes": 2.5e12}})"));
  EXPECT_EQ(file.made.words(), "any (9.0, 132 multiprocessors) for version 0.1");
  const CostTable& table = file.costs;
  EXPECT_EQ(cost(table, "sm90 d64").fixed, 0);
  EXPECT_EQ(cost(table, "sm90 d64").flops, 1e12);
  const CostTable& before = measured_costs();
  EXPECT_EQ(cost(table, "sm90_decode").bytes, 2.5e12);
  EXPECT_EQ(cost(table, "sm90_decode").fixed, cost(before, "sm90_decode").fixed);
  EXPECT_EQ(cost(table, "sm90_decode").flops, cost(before, "sm90_decode").flops);
  for (std::size_t n = 0; n < table.size(); ++n) {
    if (table[n].name == "sm90 d64" || table[n].name == "sm90_decode") continue;
    EXPECT_EQ(table[n].cost.fixed, before[n].cost.fixed) << table[n].name;
    EXPECT_EQ(table[n].cost.flops, before[n].cost.flops) << table[n].name;
    EXPECT_EQ(table[n].cost.bytes, before[n].cost.bytes) << table[n].name;
  }
}

TEST_F(TuningFile, MissingOrEmptyFile) {
  const std::string unreadable = "there is no such file that can be read, or it is empty";
  try {
    read_tuning(path, measured_costs(), kVersion);
    FAIL() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(unframed(error.what()), unreadable);
  }
  EXPECT_EQ(refusal(""), unreadable);
  EXPECT_THROW(read_tuning(::testing::TempDir(), measured_costs(), kVersion), Error);  // a folder
  std::remove(path.c_str());
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_THROW(read_tuning(path, measured_costs(), kVersion), Error);
}

TEST_F(TuningFile, WhatIsNoJson) {
  const auto line_of = [&](const std::string& content) {
    const std::string what = refusal(content), rule = ": it must be JSON: ";
    const std::size_t end = what.find(rule);
    return end != std::string::npos && what.size() > end + rule.size() ? what.substr(0, end) : what;
  };
  EXPECT_EQ(line_of("fixed = 3\n"), "line 1");
  EXPECT_EQ(line_of("{\n\"kernels\": {\n\"sm90 d64\": {\"flops\": 1e12,\n"), "line 3");  // truncated
  EXPECT_EQ(line_of("{\n\"kernels\": {\n\"sm90 d64\": {\"flops\" 1e12}}}\n"), "line 3");
  EXPECT_EQ(line_of("{\n\"kernels\": {\n\"sm90 d64\": {\n\"flops\": NaN}}}\n"), "line 4");
  EXPECT_EQ(line_of("{\n\"kernels\": {\n\"sm90 d64\": {\n\"flops\": 1e999\n}}}\n"), "line 4");
  EXPECT_EQ(line_of("{\"kernels\": {}}\n\nmore"), "line 3");
}

TEST_F(TuningFile, ReadsWhatIsWritten) {
  const TunedOn made{"NVIDIA H200 \"x\"", "9.0", 66, kVersion};
  const Tuning file = read(tuning_text(made, {{"sm90_decode", {{"fixed", 1.5e-6}, {"bytes", 4e12}}}}));
  EXPECT_EQ(file.made, made);
  EXPECT_EQ(cost(file.costs, "sm90_decode").fixed, 1.5e-6);
  EXPECT_EQ(cost(file.costs, "sm90_decode").bytes, 4e12);
}

// Its kernels may have other names.
TEST_F(TuningFile, OfAnotherVersionIsReadNoFurther) {
  const Tuning file = read(with_kernels(R"({"sm70": {"flops": 1e12}, "sm90 d64": {"flops": 1}})", "0.0.9"));
  EXPECT_EQ(file.made.version, "0.0.9");
  EXPECT_EQ(cost(file.costs, "sm90 d64").flops, cost(measured_costs(), "sm90 d64").flops);
}

TEST_F(TuningFile, UnknownAndMissingKeys) {
  const std::string members = "schema, gpu, version, kernels";
  EXPECT_EQ(refusal("[1]"), "line 1: the file must be an object of " + members);
  EXPECT_EQ(refusal("{\"gpu\": \"any\"}"), "line 1: 'schema' is missing: the file has " + members);
  EXPECT_EQ(refusal("{\"kernels\": {},\n\"kernel\": {}\n}"), "line 2: 'kernel' is unknown: the file has " + members);
  EXPECT_EQ(refusal(with_kernels("3")), "line 2: 'kernels' is 3: it must be an object");
  EXPECT_EQ(refusal(with_kernels("{\n\"sm90 d64\": {},\n\"sm70\": {\"flops\": 1e12}\n}")),
            "line 4: 'sm70' is no kernel of this version");
  EXPECT_EQ(refusal(with_kernels("{\n\"sm80 f32\": 1e12\n}")),
            "line 3: 'sm80 f32' is 1000000000000.0: it must be an object of costs");
  EXPECT_EQ(refusal(with_kernels("{\n\"sm80 f32\": {\n\"flop\": 1e12\n}}")),
            "line 4: 'flop' of 'sm80 f32' is unknown: it must be fixed, flops or bytes");
  EXPECT_EQ(refusal(with_kernels("{\n\"sm80 f32\": {},\n\"sm80 f32\": {}\n}")), "line 4: 'sm80 f32' is given twice");
}

TEST_F(TuningFile, WhatItWasMadeOn) {
  const auto with = [&](const std::string& schema, const std::string& gpu, const std::string& version) {
    return refusal("{\"schema\": " + schema + ",\n\"gpu\": " + gpu + ",\n\"version\": " + version +
                   ",\n\"kernels\": {}}");
  };
  const std::string gpu = R"({"name": "any", "compute_capability": "9.0", "multiprocessors": 132})";
  EXPECT_EQ(with("1", gpu, "\"0.1\""), "nothing was refused");
  EXPECT_EQ(with("2", gpu, "\"0.1\""), "line 1: 'schema' is 2: it must be 1");
  EXPECT_EQ(refusal("{\"tables\": [],\n\"schema\": 2}"), "line 2: 'schema' is 2: it must be 1");
  EXPECT_EQ(with("null", gpu, "\"0.1\""), "line 1: 'schema' is null: it must be 1");
  EXPECT_EQ(with("1", "\"any\"", "\"0.1\""),
            "line 2: 'gpu' must be an object of name, compute_capability, multiprocessors");
  EXPECT_EQ(with("1", R"({"name": "any", "multiprocessors": 132})", "\"0.1\""),
            "line 2: 'compute_capability' is missing: 'gpu' has name, compute_capability, multiprocessors");
  EXPECT_EQ(with("1", R"({"name": 3, "compute_capability": "9.0", "multiprocessors": 132})", "\"0.1\""),
            "line 2: 'name' is 3: it must be a string");
  for (const char* count : {"0", "-1", "1.5", "\"132\"", "18446744073709551615", "null"}) {
    EXPECT_EQ(
        with("1", R"({"name": "any", "compute_capability": "9.0", "multiprocessors": )" + std::string(count) + "}",
             "\"0.1\""),
        "line 2: 'multiprocessors' is " + std::string(count) + ": it must be from 1 to 65536");
  }
  EXPECT_EQ(with("1", gpu, "0.1"), "line 3: 'version' is 0.1: it must be a string");
}

TEST_F(TuningFile, NestedDeep) {
  using heddle::test::nested_arrays, heddle::test::nested_objects;
  const std::string rule = "arrays and objects are nested more than 64 deep";
  EXPECT_EQ(refusal(nested_arrays()), "line 1: " + rule);
  EXPECT_EQ(refusal(nested_objects()), "line 1: " + rule);
  EXPECT_EQ(refusal("{\n\"kernels\":\n" + nested_arrays() + "}"), "line 3: " + rule);
  EXPECT_EQ(refusal("{\n\"kernels\": {\"sm80 f32\": {\n\"flops\":" + nested_objects() + "}}}"), "line 3: " + rule);
}

TEST_F(TuningFile, BadNumbers) {
  const auto with = [&](const std::string& field) {
    return refusal(with_kernels("{\n\"sm90 d64\": {\"flops\": 1e12},\n\"sm80 f32\": {\n" + field + "\n}}"));
  };
  EXPECT_EQ(with("\"fixed\": -1e-6"), "line 5: 'fixed' of 'sm80 f32' is -1e-06: it must be a number of at least 0");
  EXPECT_EQ(with("\"flops\": 0"), "line 5: 'flops' of 'sm80 f32' is 0: it must be a number of at least 1");
  EXPECT_EQ(with("\"bytes\": null"), "line 5: 'bytes' of 'sm80 f32' is null: it must be a number of at least 1");
  EXPECT_EQ(with("\"flops\": \"NaN\""), "line 5: 'flops' of 'sm80 f32' is \"NaN\": it must be a number of at least 1");
}

}  // namespace
}  // namespace heddle::cuda
