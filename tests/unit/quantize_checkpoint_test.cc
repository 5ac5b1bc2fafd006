// Checkpoints quantised: what is written is what quantize() gives, read back by the reader of checkpoints.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/dtypes.h"
#include "heddle/checkpoint.h"
#include "heddle/error.h"
#include "unit/quantized_model.h"

namespace heddle::lowbit {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::add;
using test::FileBytes;
using test::Folder;
using test::kColumns;
using test::kRows;
using test::kUp;
using test::model;
using test::normal;
using test::Storage;
using test::with;

// What quantize() makes of a layer of the input, with the global scale that the output has.
Storage quantized(const FileBytes& file, const StoredLayer& layer, ScaleRule rule, float global_scale) {
  Storage out(layer);
  for (const FileBytes::Tensor& tensor : file.tensors) {
    if (tensor.name != layer.name + ".weight") continue;
    QuantizeOptions options;
    options.rule = rule;
    options.global_scale = global_scale;
    quantize(TensorView(tensor.data.data(), DType::f32, {layer.rows, layer.columns}), options, out.matrix);
  }
  return out;
}

class EveryFormat : public testing::TestWithParam<const char*> {};

TEST_P(EveryFormat, ReadsBackToTheBit) {
  const Folder folder;
  const FileBytes file = model();
  folder.write("in/model.safetensors", file.bytes());
  const QuantizeReport report = quantize_checkpoint(folder.at("in"), folder.at("out"), with(GetParam()));
  ASSERT_EQ(report.layers.size(), 7u);
  const Checkpoint checkpoint = Checkpoint::open({folder.at("out")});
  const std::vector<StoredLayer> layers = checkpoint.layers();
  ASSERT_EQ(layers.size(), 7u);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    EXPECT_EQ(layers[i].refusal, "");
    EXPECT_EQ(layers[i].name, report.layers[i].name);
    EXPECT_EQ(name_of(layers[i].format), GetParam());
    const Storage found = test::loaded(checkpoint, layers[i].name);
    const Storage wanted = quantized(file, layers[i], ScaleRule::mse, report.layers[i].global_scale);
    EXPECT_EQ(found.memory, wanted.memory) << layers[i].name;
    // The report's error is that of the weights as they are read.
    WorkspaceBuffer scratch;
    Runtime runtime;
    runtime.workspace = scratch.get(quantization_error_workspace(kRows));
    const auto& weights = std::find_if(file.tensors.begin(), file.tensors.end(), [&](const auto& tensor) {
                            return tensor.name == layers[i].name + ".weight";
                          })->data;
    const QuantizationError error =
        quantization_error(TensorView(weights.data(), DType::f32, {kRows, kColumns}), found.matrix, {}, {}, runtime);
    EXPECT_EQ(error.sqnr, report.layers[i].error.sqnr);
    EXPECT_EQ(error.max, report.layers[i].error.max);
  }
  // All else is as it was.
  const SafeTensors before = SafeTensors::open(folder.at("in/model.safetensors"));
  const SafeTensors after = SafeTensors::open(folder.at("out/model.safetensors"));
  for (const char* name : {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.input_layernorm.weight",
                           "model.layers.0.self_attn.q_proj.bias"}) {
    const auto &a = before.entries().at(name), &b = after.entries().at(name);
    ASSERT_EQ(a.bytes, b.bytes);
    EXPECT_EQ(std::memcmp(a.data, b.data, a.bytes), 0);
  }
  std::size_t bytes = 0;
  for (const auto& [name, entry] : after.entries()) bytes += entry.bytes;
  EXPECT_EQ(report.bytes_after, bytes);
  EXPECT_EQ(report.kept, (std::vector<std::string>{"lm_head", "model.embed_tokens"}));
  const json config = json::parse(folder.read("out/config.json"));
  EXPECT_EQ(config["quantization_config"], json::parse(report.quantization_config));
}

INSTANTIATE_TEST_SUITE_P(, EveryFormat,
                         testing::Values("nvfp4", "mxfp4", "int4_g32", "int4_g64", "int4_g128", "int4_g32_zp",
                                         "int4_g64_zp", "int4_g128_zp", "int8_row", "fp8_row", "nf4", "nf4_b128",
                                         "fp4_bnb"));

TEST(QuantizeCheckpoint, ExpertsInOneTensorAreListed) {
  const Folder folder;
  FileBytes file = model();
  file.add("model.layers.0.mlp.experts.gate_up_proj", "F32", {3, 40, 8}, normal(3 * 40 * 8, 94));
  file.add("model.layers.0.mlp.experts.down_proj.weight", "BF16", {3, 8, 20}, std::vector<std::uint16_t>(480, 1));
  file.add("model.layers.0.mlp.experts.groups", "I32", {3, 1, 2}, std::vector<std::int32_t>(6, 1));
  folder.write("in.safetensors", file.bytes());
  const QuantizeReport report = quantize_checkpoint(folder.at("in.safetensors"), folder.at("out"));
  EXPECT_EQ(report.layers.size(), 7u);
  EXPECT_EQ(report.kept, (std::vector<std::string>{"lm_head", "model.embed_tokens"}));
  ASSERT_EQ(report.copied_3d.size(), 2u);
  EXPECT_EQ(report.copied_3d[0].name, "model.layers.0.mlp.experts.down_proj.weight");
  EXPECT_EQ(report.copied_3d[1].name, "model.layers.0.mlp.experts.gate_up_proj");
  EXPECT_EQ(report.copied_3d[1].shape, (std::vector<std::int64_t>{3, 40, 8}));
  EXPECT_EQ(report.copied_3d[0].bytes, 960u);
  const SafeTensors after = SafeTensors::open(folder.at("out/" + report.copied_3d[0].file));
  for (const CopiedTensor& tensor : report.copied_3d) EXPECT_EQ(after.entries().at(tensor.name).bytes, tensor.bytes);
}

TEST(QuantizeCheckpoint, RowsOfAnyLengthIn8Bits) {
  for (const char* format : {"int8_row", "fp8_row"}) {
    for (const std::int64_t columns : {1, 5, 7, 8, 37}) {
      const Folder folder;
      FileBytes file;
      add(file, "h.0.fc1", 3, columns, 5);
      folder.write("model.safetensors", file.bytes());
      quantize_checkpoint(folder.at("model.safetensors"), folder.at("out"), with(format));
      const Checkpoint checkpoint = Checkpoint::open({folder.at("out")});
      const StoredLayer layer = checkpoint.layer("h.0.fc1");
      EXPECT_EQ(layer.columns, columns);
      EXPECT_EQ(test::loaded(checkpoint, "h.0.fc1").memory, quantized(file, layer, ScaleRule::mse, 0).memory);
    }
  }
}

TEST(QuantizeCheckpoint, LayersThatRunAsOneShareAGlobalScale) {
  const Folder folder;
  folder.write("in/model.safetensors", model().bytes());
  for (const ScaleRule rule : {ScaleRule::plain, ScaleRule::four_six}) {
    QuantizeCheckpointOptions options;
    options.rule = rule;
    const std::string out = folder.at(std::string("out_") + name_of(rule));
    std::map<std::string, float> scale;
    for (const LayerReport& layer : quantize_checkpoint(folder.at("in"), out, options).layers) {
      scale[layer.name.substr(layer.name.rfind('.') + 1)] = layer.global_scale;
      int exponent = 0;
      EXPECT_EQ(std::frexp(layer.global_scale, &exponent), 0.5f);
    }
    EXPECT_EQ(scale["q_proj"], scale["k_proj"]);
    EXPECT_EQ(scale["q_proj"], scale["v_proj"]);
    EXPECT_EQ(scale["gate_proj"], scale["up_proj"]);
    // Deviations are 3, 4, 6 and 7, the largest of 5120 numbers about 4 deviations.
    EXPECT_NE(scale["v_proj"], scale["up_proj"]);
    // The least power of two that no group's scale passes.
    const std::vector<float> v = normal(kRows * kColumns, 3, 3);
    float largest = 0;
    for (const float value : v) largest = std::max(largest, std::abs(value));
    const float own = largest / (6 * (rule == ScaleRule::plain ? 448.0f : 256.0f));
    EXPECT_GE(scale["q_proj"], own);
    EXPECT_LT(scale["q_proj"], 2 * own);
  }
}

TEST(QuantizeCheckpoint, ShardsAndTheirIndex) {
  const Folder folder;
  FileBytes first, second;
  add(first, "model.layers.0.mlp.gate_proj", kRows, kColumns, 1);
  add(first, "model.embed_tokens", 7, kColumns, 2);
  add(second, kUp, kRows, kColumns, 3, 100);
  folder.write("in/a-00001.safetensors", first.bytes());
  folder.write("in/a-00002.safetensors", second.bytes());
  folder.write("in/consolidated.safetensors", "not a file of the index");
  folder.write("in/pytorch_model.bin", "other weights");
  folder.write("in/tokenizer.json", "{}");
  folder.write("in/1_Pooling/config.json", "{1}");
  folder.write("in/onnx/model.json", "other weights");
  folder.write("in/config.json", R"({"model_type": "llama", "torch_dtype": "float32"})");
  json index = {{"metadata", {{"total_size", 1}, {"note", "kept"}}}, {"weight_map", json::object()}};
  index["weight_map"]["model.layers.0.mlp.gate_proj.weight"] = "a-00001.safetensors";
  index["weight_map"]["model.embed_tokens.weight"] = "a-00001.safetensors";
  index["weight_map"][std::string(kUp) + ".weight"] = "a-00002.safetensors";
  folder.write("in/model.safetensors.index.json", index.dump());

  const QuantizeReport report = quantize_checkpoint(folder.at("in"), folder.at("out"));
  ASSERT_EQ(report.layers.size(), 2u);
  EXPECT_EQ(report.layers[0].global_scale, report.layers[1].global_scale);  // across files
  EXPECT_EQ(report.layers[1].file, "a-00002.safetensors");
  const json written = json::parse(folder.read("out/model.safetensors.index.json"));
  EXPECT_EQ(written["metadata"]["note"], "kept");
  EXPECT_EQ(written["metadata"]["total_size"], report.bytes_after);
  std::size_t tensors = 0;
  for (const char* name : {"a-00001.safetensors", "a-00002.safetensors"}) {
    const SafeTensors file = SafeTensors::open(folder.at(std::string("out/") + name));
    for (const auto& [tensor, entry] : file.entries()) EXPECT_EQ(written["weight_map"][tensor], name);
    tensors += file.entries().size();
  }
  EXPECT_EQ(written["weight_map"].size(), tensors);
  const json config = json::parse(folder.read("out/config.json"));
  EXPECT_EQ(config["model_type"], "llama");
  EXPECT_EQ(config["quantization_config"]["format"], "nvfp4-pack-quantized");
  EXPECT_EQ(folder.read("out/tokenizer.json"), "{}");
  EXPECT_EQ(folder.read("out/1_Pooling/config.json"), "{1}");
  EXPECT_FALSE(fs::exists(folder.at("out/onnx")));
  EXPECT_FALSE(fs::exists(folder.at("out/pytorch_model.bin")));
  EXPECT_FALSE(fs::exists(folder.at("out/consolidated.safetensors")));
}

TEST(QuantizeCheckpoint, RulesDecideInTheirOrder) {
  const Folder folder;
  const FileBytes file = model();
  folder.write("in/model.safetensors", file.bytes());
  const QuantizeReport report = quantize_checkpoint(folder.at("in"), folder.at("out"),
                                                    with("nvfp4", {{"*.o_proj", "keep"},
                                                                   {"model.layers.?.mlp.*", "int4_g64:plain"},
                                                                   {"*_proj", "16bit"},
                                                                   {"lm_head", "fp8_row"}}));
  std::map<std::string, std::string> formats;
  for (const LayerReport& layer : report.layers) {
    formats[layer.name.substr(layer.name.rfind('.') + 1)] = layer.format + ":" + layer.rule;
  }
  const std::map<std::string, std::string> wanted = {{"q_proj", "bfloat16:"},       {"k_proj", "bfloat16:"},
                                                     {"v_proj", "bfloat16:"},       {"gate_proj", "int4_g64:plain"},
                                                     {"up_proj", "int4_g64:plain"}, {"down_proj", "int4_g64:plain"},
                                                     {"lm_head", "fp8_row:mse"}};
  EXPECT_EQ(formats, wanted);
  const SafeTensors after = SafeTensors::open(folder.at("out/model.safetensors"));
  EXPECT_EQ(after.entries().at("model.layers.0.self_attn.o_proj.weight").dtype, "F32");
  const auto& q = after.entries().at("model.layers.0.self_attn.q_proj.weight");
  EXPECT_EQ(q.dtype, "BF16");
  const std::vector<float> weights = normal(kRows * kColumns, 1, 1);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    ASSERT_EQ(static_cast<const std::uint16_t*>(q.data)[i], f32_to_bf16(weights[i]));
  }
  const json config = json::parse(report.quantization_config);
  EXPECT_EQ(config["format"], "mixed-precision");
  ASSERT_EQ(config["config_groups"].size(), 2u);
  EXPECT_EQ(config["config_groups"]["group_0"]["targets"], json::array({"lm_head"}));
  EXPECT_EQ(config["config_groups"]["group_1"]["targets"].size(), 3u);
  const auto ignored = config["ignore"].get<std::vector<std::string>>();
  EXPECT_EQ(std::count(ignored.begin(), ignored.end(), "model.layers.0.self_attn.q_proj"), 1);
  EXPECT_EQ(std::count(ignored.begin(), ignored.end(), "lm_head"), 0);
}

TEST(QuantizeCheckpoint, ImportanceWeighsColumns) {
  const Folder folder;
  FileBytes file;
  add(file, kUp, kRows, kColumns, 1);
  folder.write("in.safetensors", file.bytes());
  std::vector<float> weights(kColumns, 0.01f);
  for (std::size_t k = 0; k < weights.size(); k += 16) weights[k] = 100;
  QuantizeCheckpointOptions options = with("int4_g64");
  options.importance = [&](const std::string& layer) {
    return layer == kUp ? TensorView(weights.data(), DType::f32, {kColumns}) : TensorView();
  };
  quantize_checkpoint(folder.at("in.safetensors"), folder.at("out"), options);
  const Checkpoint checkpoint = Checkpoint::open({folder.at("out")});
  Storage wanted(checkpoint.layer(kUp));
  QuantizeOptions direct;
  direct.rule = ScaleRule::mse;
  direct.importance = TensorView(weights.data(), DType::f32, {kColumns});
  quantize(TensorView(file.tensors[0].data.data(), DType::f32, {kRows, kColumns}), direct, wanted.matrix);
  EXPECT_EQ(test::loaded(checkpoint, kUp).memory, wanted.memory);
  direct.importance = {};
  Storage without(checkpoint.layer(kUp));
  quantize(TensorView(file.tensors[0].data.data(), DType::f32, {kRows, kColumns}), direct, without.matrix);
  EXPECT_NE(without.memory, wanted.memory);
}

TEST(QuantizeCheckpoint, DataThatIsNotAligned) {
  const Folder folder;
  FileBytes file;
  const auto viewable = [&] {
    const SafeTensors opened = SafeTensors::open(folder.at("in.safetensors"));
    return reinterpret_cast<std::uintptr_t>(opened.entries().at(std::string(kUp) + ".weight").data) % 4 == 0;
  };
  int padding = 1;
  do {
    file.tensors.clear();
    file.add("a", "U8", {padding}, std::vector<std::uint8_t>(static_cast<std::size_t>(padding)));
    add(file, kUp, kRows, kColumns, 1);
    folder.write("in.safetensors", file.bytes());
  } while (viewable() && ++padding < 9);
  ASSERT_FALSE(viewable());
  quantize_checkpoint(folder.at("in.safetensors"), folder.at("out"), with("mxfp4"));
  const Checkpoint checkpoint = Checkpoint::open({folder.at("out")});
  EXPECT_EQ(test::loaded(checkpoint, kUp).memory, quantized(file, checkpoint.layer(kUp), ScaleRule::mse, 0).memory);
}

// VmHWM: the most memory that was resident, in bytes; 0 if the system does not say.
std::size_t peak_resident() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stoull(line.substr(6)) * 1024;
  }
  return 0;
}

TEST(QuantizeCheckpoint, OneTensorAtATimeIsInMemory) {
  constexpr std::int64_t kSide = 2048;
  constexpr std::size_t kTensor = kSide * kSide * 4;
  const Folder folder;
  {
    const std::vector<float> weights = normal(kSide * kSide, 1);
    FileBytes file;
    for (int i = 0; i < 8; ++i) {
      file.add((i < 6 ? "h." : "embed.") + std::to_string(i) + ".up.weight", "F32", {kSide, kSide}, weights);
    }
    folder.write("in.safetensors", file.bytes());
  }
  if (!(std::ofstream("/proc/self/clear_refs") << "5" << std::flush)) GTEST_SKIP() << "the peak cannot be reset";
  const std::size_t before = peak_resident();
  QuantizeCheckpointOptions options;
  options.rule = ScaleRule::plain;
  EXPECT_EQ(quantize_checkpoint(folder.at("in.safetensors"), folder.at("out"), options).layers.size(), 6u);
  // The tensor, what it becomes, and as much again; the file has eight of them.
  EXPECT_LT(peak_resident() - before, kTensor * 5 / 2);
}

TEST(QuantizeCheckpoint, Progress) {
  const Folder folder;
  const FileBytes file = model();
  folder.write("in/model.safetensors", file.bytes());
  std::vector<QuantizeProgress> seen;
  QuantizeCheckpointOptions options;
  options.progress = [&](const QuantizeProgress& at) { seen.push_back(at); };
  quantize_checkpoint(folder.at("in"), folder.at("out"), options);
  ASSERT_EQ(seen.size(), file.tensors.size() + 1);
  EXPECT_EQ(seen.front().bytes_done, 0u);
  EXPECT_EQ(seen.back().tensor, "");
  EXPECT_EQ(seen.back().bytes_done, seen.back().bytes_total);
  EXPECT_EQ(seen.back().layers_done, 7u);
  EXPECT_EQ(seen.back().layers_total, 7u);
}

}  // namespace
}  // namespace heddle::lowbit
