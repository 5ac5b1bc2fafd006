// What quantising a checkpoint refuses, and that nothing stays of it.
#include <csignal>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <sys/resource.h>

#include "heddle/checkpoint.h"
#include "heddle/error.h"
#include "unit/quantized_model.h"

namespace heddle::lowbit {
namespace {

namespace fs = std::filesystem;
using test::add;
using test::FileBytes;
using test::Folder;
using test::kColumns;
using test::kUp;
using test::model;
using test::with;

struct Refusal {
  const char* name;
  std::function<void(const Folder&)> prepare;
  QuantizeCheckpointOptions options;
  const char* message;
};

void write_model(const Folder& folder, const std::function<void(FileBytes&)>& change = {}) {
  FileBytes file = model();
  if (change) change(file);
  folder.write("in/model.safetensors", file.bytes());
}

std::function<void(const Folder&)> with_value(float value) {
  return [value](const Folder& folder) {
    write_model(folder, [&](FileBytes& file) {
      std::memcpy(file.at(std::string(kUp) + ".weight").data.data() + 4 * (kColumns + 3), &value, 4);
    });
  };
}

std::vector<Refusal> refusals() {
  const auto plain = [](const Folder& folder) { write_model(folder); };
  const auto config = [](const char* content) {
    return [content](const Folder& folder) {
      write_model(folder);
      folder.write("in/config.json", content);
    };
  };
  QuantizeCheckpointOptions stops;
  stops.progress = [](const QuantizeProgress& at) {
    if (at.layers_done == 3) throw Error("that is enough");
  };
  QuantizeCheckpointOptions weighs;
  weighs.importance = [](const std::string&) { return TensorView(); };
  weighs.importance_layers = {kUp, "model.layers.0.mlp.up_porj"};
  constexpr float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  return {
      {"nan", with_value(nan), {}, "model.safetensors: tensor 'model.layers.0.mlp.up_proj.weight' holds nan at [1, 3]"},
      {"inf", with_value(inf), {}, "holds inf at [1, 3]"},
      {"nan_int4", with_value(nan), with("int4_g64"), "tensor 'model.layers.0.mlp.up_proj.weight': weights"},
      {"nan_16bit", with_value(nan), with("nvfp4", {{kUp, "16bit"}}), "bfloat16 does not hold it"},
      {"beyond_16bit", with_value(3.4e38f), with("nvfp4", {{kUp, "16bit"}}), "bfloat16 does not hold it"},
      {"group",
       [](const Folder& folder) {
         write_model(folder, [](FileBytes& file) { add(file, "model.layers.1.mlp.up_proj", 4, 40, 1); });
       },
       {},
       "'model.layers.1.mlp.up_proj.weight' is [4, 40]: K = 40 is no multiple of 16, the group of nvfp4"},
      {"dtype",
       [](const Folder& folder) {
         write_model(folder, [](FileBytes& file) {
           file.add<std::int64_t>("model.layers.1.x.weight", "I64", {1, 2}, {1, 2});
         });
       },
       {},
       "'model.layers.1.x.weight' is I64: only F32, F16 and BF16 are quantised"},
      {"empty",
       [](const Folder& folder) {
         write_model(folder, [](FileBytes& file) { file.add<float>("model.layers.1.x.weight", "F32", {0, 16}, {}); });
       },
       {},
       "is [0, 16]: it is empty"},
      {"unknown_format", plain, with("nvfp5"), "format is 'nvfp5': it must be one of"},
      {"unknown_rule", plain, with("nvfp4:best"), "best"},
      {"rule_of_other", plain, with("int4_g64:four_six"), "model.safetensors: tensor"},
      {"no_layout", plain, with("e2m1_row"), "format is 'e2m1_row': no layout of checkpoints holds it"},
      {"two_producers", plain, with("nvfp4", {{"*q_proj", "nf4"}}), "formats nvfp4 and nf4 are in one checkpoint"},
      {"two_bnb", plain, with("nf4", {{"*q_proj", "fp4_bnb"}}), "formats nf4 and fp4_bnb are in one checkpoint"},
      {"unmatched", plain, with("nvfp4", {{"*.q_porj", "keep"}}), "pattern '*.q_porj' decides over no layer"},
      {"overruled", plain, with("nvfp4", {{"*", "16bit"}, {"*q_proj", "int8_row"}}),
       "pattern '*q_proj' decides over no"},
      {"importance", plain, weighs, "importance has 'model.layers.0.mlp.up_porj', which is no layer of "},
      {"nothing", plain, with("nvfp4", {{"*", "keep"}}), "has no layer to quantise"},
      {"quantised_config", config(R"({"quantization_config": {}})"), {}, "the checkpoint is quantised already"},
      {"config", config("[1]"), {}, "config.json is not a JSON object"},
      {"quantised_tensors",
       [](const Folder& folder) { folder.write("in/model.safetensors", test::compressed_nvfp4().bytes()); },
       {},
       "'l.weight_packed' is of a layer that is quantised already"},
      {"truncated",
       [](const Folder& folder) {
         const std::string bytes = model().bytes();
         folder.write("in/model.safetensors", bytes.substr(0, bytes.size() - 5));
       },
       {},
       "model.safetensors: tensor"},
      {"no_files", [](const Folder& folder) { fs::create_directory(folder.at("in")); }, {}, "has no *.safetensors"},
      {"exists",
       [](const Folder& folder) {
         write_model(folder);
         folder.write("out/file", "precious");
       },
       {},
       "exists: it must be a new folder"},
      {"two_files",
       [](const Folder& folder) {
         write_model(folder);
         folder.write("in/copy.safetensors", model().bytes());
       },
       {},
       "each must be in one file"},
      {"index",
       [](const Folder& folder) {
         write_model(folder);
         folder.write("in/model.safetensors.index.json",
                      R"({"weight_map": {"lm_head.weight": "model.safetensors", "gone": "model.safetensors"}})");
       },
       {},
       "tensor 'gone' is not in 'model.safetensors'"},
      {"index_lacks",
       [](const Folder& folder) {
         write_model(folder);
         folder.write("in/model.safetensors.index.json", R"({"weight_map": {"lm_head.weight": "model.safetensors"}})");
       },
       {},
       "is not in"},
      {"index_path",
       [](const Folder& folder) {
         write_model(folder);
         folder.write("in/model.safetensors.index.json", R"({"weight_map": {"x": "../model.safetensors"}})");
       },
       {},
       "it must be a safetensors file of the folder"},
      {"stopped", plain, stops, "that is enough"},
  };
}

class Refused : public testing::TestWithParam<Refusal> {};

TEST_P(Refused, AndNothingIsLeftWritten) {
  const Folder folder;
  GetParam().prepare(folder);
  const std::vector<std::string> before = folder.names();
  try {
    quantize_checkpoint(folder.at("in"), folder.at("out"), GetParam().options);
    FAIL() << "it was taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(GetParam().message), std::string::npos) << error.what();
  }
  EXPECT_EQ(folder.names(), before);
  if (fs::exists(folder.at("out"))) {
    EXPECT_EQ(folder.read("out/file"), "precious");
  }
}

INSTANTIATE_TEST_SUITE_P(, Refused, testing::ValuesIn(refusals()), [](const auto& info) { return info.param.name; });

// Arguments are looked at whole before the first layer is quantised, which may take hours.
TEST(QuantizeCheckpoint, ArgumentsOfLateLayersAreRefusedFirst) {
  const Folder folder;
  write_model(folder);
  const std::string last = "model.layers.0.self_attn.v_proj";
  const auto refusal = [&](QuantizeCheckpointOptions options) {
    bool begun = false;
    options.progress = [&](const QuantizeProgress&) { begun = true; };
    std::string message;
    try {
      quantize_checkpoint(folder.at("in"), folder.at("out"), options);
    } catch (const Error& error) {
      message = error.what();
    }
    EXPECT_FALSE(begun) << message;
    return message;
  };
  const std::string where =
      "[quantize_checkpoint] " + folder.at("in/model.safetensors") + ": tensor '" + last + ".weight': ";
  EXPECT_EQ(refusal(with("nvfp4", {{last, "int4_g64:four_six"}})),
            where + "rule is four_six, which int4_g64 does not have");
  std::vector<float> values(kColumns + 1, 1.0f);
  values[5] = -1;
  for (const std::int64_t K : {kColumns, kColumns + 1}) {
    QuantizeCheckpointOptions options;
    options.importance = [&](const std::string& layer) {
      return layer == last ? TensorView(values.data(), DType::f32, {K}) : TensorView();
    };
    EXPECT_EQ(refusal(options), where + (K == kColumns ? "importance[5] is -1: it must be finite and at least 0"
                                                       : "importance is [257]: it must be [K] = [256]"));
  }
}

TEST(QuantizeCheckpoint, FilesThatCannotBeWritten) {
  const Folder folder;
  write_model(folder);
  const std::vector<std::string> before = folder.names();
  // A limit on the size of files says what a full disk says, to whoever ignores the signal.
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  const rlimit small{.rlim_cur = 4096, .rlim_max = limit.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  std::string message;
  try {
    quantize_checkpoint(folder.at("in"), folder.at("out"));
  } catch (const RuntimeError& error) {
    message = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("model.safetensors: File too large"), std::string::npos) << message;
  EXPECT_EQ(folder.names(), before);

  EXPECT_THROW(quantize_checkpoint(folder.at("in"), folder.at("no/such/out")), RuntimeError);
  EXPECT_THROW(quantize_checkpoint(folder.at("nowhere"), folder.at("out")), RuntimeError);
  EXPECT_EQ(folder.names(), before);
}

}  // namespace
}  // namespace heddle::lowbit
