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

class Tuning : public ::testing::Test {
 protected:
  const std::string path = ::testing::TempDir() + "heddle_tuning_" + std::to_string(getpid()) + ".json";

  ~Tuning() override { std::remove(path.c_str()); }

  CostTable read(const std::string& content) const {
    std::ofstream(path) << content;
    return read_tuning(path, measured_costs());
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
    for (const CostLine& line : table) {
      if (line.name == name) return line.cost;
    }
    throw RuntimeError("no such line");
  }
};

TEST_F(Tuning, ChangesWhatItNamesAndNothingElse) {
  const CostTable table = read(R"({"gpu": "any", "version": "0.1", "kernels": {
    "sm90 d64": {"fixed": 0, "flops": 1e12},
    "sm90_decode": {"bytes": 2.5e12}}})");
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

TEST_F(Tuning, MissingOrEmptyFile) {
  const std::string unreadable = "there is no such file that can be read, or it is empty";
  try {
    read_tuning(path, measured_costs());
    FAIL() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(unframed(error.what()), unreadable);
  }
  EXPECT_EQ(refusal(""), unreadable);
  EXPECT_THROW(read_tuning(::testing::TempDir(), measured_costs()), Error);  // a folder
  std::remove(path.c_str());
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_THROW(read_tuning(path, measured_costs()), Error);
}

TEST_F(Tuning, WhatIsNoJson) {
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

TEST_F(Tuning, UnknownAndMissingKeys) {
  EXPECT_EQ(refusal("[1]"), "line 1: the file must be an object with 'kernels'");
  EXPECT_EQ(refusal("{\"gpu\": \"any\"}"), "line 1: 'kernels' is missing: it must be an object of kernels' costs");
  EXPECT_EQ(refusal("{\n\"kernels\": 3\n}"), "line 2: 'kernels' is 3: it must be an object");
  EXPECT_EQ(refusal("{\"kernels\": {},\n\"kernel\": {}\n}"),
            "line 2: 'kernel' is unknown: it must be gpu, version or kernels");
  EXPECT_EQ(refusal("{\"kernels\": {\n\"sm90 d64\": {},\n\"sm70\": {\"flops\": 1e12}\n}}"),
            "line 3: 'sm70' is no kernel of this version");
  EXPECT_EQ(refusal("{\"kernels\": {\n\"sm80 f32\": 1e12\n}}"),
            "line 2: 'sm80 f32' is 1000000000000.0: it must be an object of costs");
  EXPECT_EQ(refusal("{\"kernels\": {\n\"sm80 f32\": {\n\"flop\": 1e12\n}}}"),
            "line 3: 'flop' of 'sm80 f32' is unknown: it must be fixed, flops or bytes");
  EXPECT_EQ(refusal("{\"kernels\": {\n\"sm80 f32\": {},\n\"sm80 f32\": {}\n}}"), "line 3: 'sm80 f32' is given twice");
}

TEST_F(Tuning, NestedDeep) {
  using heddle::test::nested_arrays, heddle::test::nested_objects;
  const std::string rule = "arrays and objects are nested more than 64 deep";
  EXPECT_EQ(refusal(nested_arrays()), "line 1: " + rule);
  EXPECT_EQ(refusal(nested_objects()), "line 1: " + rule);
  EXPECT_EQ(refusal("{\n\"kernels\":\n" + nested_arrays() + "}"), "line 3: " + rule);
  EXPECT_EQ(refusal("{\n\"kernels\": {\"sm80 f32\": {\n\"flops\":" + nested_objects() + "}}}"), "line 3: " + rule);
}

TEST_F(Tuning, BadNumbers) {
  const auto with = [&](const std::string& field) {
    return refusal("{\"kernels\": {\n\"sm90 d64\": {\"flops\": 1e12},\n\"sm80 f32\": {\n" + field + "\n}}}");
  };
  EXPECT_EQ(with("\"fixed\": -1e-6"), "line 4: 'fixed' of 'sm80 f32' is -1e-06: it must be a number of at least 0");
  EXPECT_EQ(with("\"flops\": 0"), "line 4: 'flops' of 'sm80 f32' is 0: it must be a number of at least 1");
  EXPECT_EQ(with("\"bytes\": null"), "line 4: 'bytes' of 'sm80 f32' is null: it must be a number of at least 1");
  EXPECT_EQ(with("\"flops\": \"NaN\""), "line 4: 'flops' of 'sm80 f32' is \"NaN\": it must be a number of at least 1");
}

}  // namespace
}  // namespace heddle::cuda
