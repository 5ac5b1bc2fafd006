// The encoder on a GPU against the textbook one in double precision.
#include <gtest/gtest.h>

#include <ostream>

#include "heddle/error.h"
#include "kit/device_mirror.h"
#include "kit/messages.h"
#include "unit/encoder_expected.h"
#include "unit/encoder_model.h"

namespace heddle::kit {
namespace {

using test::as_held;
using test::EncoderExpected;
using test::hold;
using test::Input;
using test::kConfig;
using test::kLengths;
using test::ModelFolder;

struct Output {
  std::vector<float> embeddings, hidden;
};

TensorView view_of(const DeviceMemory& memory, DType dtype, std::int64_t rows, std::int64_t columns) {
  TensorView view(memory.data(), dtype, {rows, columns});
  view.device = Device::cuda;
  return view;
}

// `poison` fills workspace and outputs.
Output encode(const Encoder& encoder, const Input& input, bool normalize = true, int poison = 0xFF) {
  const std::int64_t hidden = encoder.config().hidden;
  Output out;
  out.embeddings.resize(static_cast<std::size_t>(input.sequences() * hidden));
  out.hidden.resize(static_cast<std::size_t>(input.total() * hidden));
  const DeviceMemory embeddings(4 * out.embeddings.size(), poison), states(4 * out.hidden.size(), poison);
  const DeviceMemory scratch(encoder.workspace(input.total(), input.sequences(), input.longest()), poison);
  const DeviceStream stream;
  Runtime runtime;
  runtime.stream = stream.get();
  runtime.workspace = {scratch.data(), scratch.bytes()};
  encoder.encode(input.id_view(), input.offset_view(), view_of(embeddings, DType::f32, input.sequences(), hidden),
                 view_of(states, DType::f32, input.total(), hidden), normalize, runtime);
  stream.synchronize();
  embeddings.read(0, out.embeddings.data(), embeddings.bytes());
  states.read(0, out.hidden.data(), states.bytes());
  return out;
}

EncoderOptions on_gpu(DType dtype, std::vector<lowbit::LayerRule> rules = {}, std::string method = "") {
  return {.dtype = dtype, .method = std::move(method), .layers = std::move(rules), .device = Device::cuda};
}

struct Case {
  std::string name;
  DType dtype;
  std::vector<lowbit::LayerRule> rules;
  std::string method;
  friend void PrintTo(const Case& c, std::ostream* to) { *to << c.name; }
};

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const std::string name = name_of(dtype);
    out.push_back({name, dtype, {}, ""});
    out.push_back({name + "_baseline", dtype, {}, "baseline"});
    for (const std::string format :
         {"nvfp4", "mxfp4", "int4_g64", "int4_g128_zp", "nf4", "fp4_bnb", "int8_row", "fp8_row", "e2m1_row"}) {
      out.push_back({format + "_" + name, dtype, {{"*", format}}, ""});
    }
    out.push_back(
        {"mixed_" + name, dtype, {{"*.query", "nvfp4:mse"}, {"*layer.1.*", name}, {"*.output.dense", "int8_row"}}, ""});
  }
  return out;
}

// Of the model as its weights are held.
EncoderExpected expected(ModelFolder* folder, std::vector<lowbit::LayerRule> rules, const Input& input, DType dtype) {
  rules.push_back({"*", name_of(dtype)});
  hold(folder, rules);
  for (auto& [name, tensor] : folder->tensors) {
    if (!name.starts_with("embeddings.") || tensor.shape.size() != 2) continue;
    tensor.values = as_held(tensor.values, tensor.shape[0], tensor.shape[1], name_of(dtype));
  }
  return {*folder, DType::f32, dtype, input};
}

class GpuEncoder : public testing::TestWithParam<Case> {};

TEST_P(GpuEncoder, IsWithinTheRule) {
  const Case& c = GetParam();
  ModelFolder folder(kConfig);
  folder.write();
  const Encoder encoder = Encoder::load(folder.path(), on_gpu(c.dtype, c.rules, c.method));
  const Input input(kLengths);
  const Output found = encode(encoder, input);

  const EncoderExpected right = expected(&folder, c.rules, input, c.dtype);
  right.hidden.expect_right(found.hidden);
  right.embeddings.expect_right(found.embeddings);

  const Output again = encode(encoder, input, true, 0x11);
  EXPECT_EQ(again.hidden, found.hidden);
  EXPECT_EQ(again.embeddings, found.embeddings);

  ASSERT_EQ(encoder.layers().size(), 12u);
  for (const EncoderLayerInfo& layer : encoder.layers()) {
    std::string wanted = name_of(c.dtype);
    for (const lowbit::LayerRule& rule : c.rules) {
      if (!lowbit::matches(rule.pattern, layer.name)) continue;
      wanted = rule.format.substr(0, rule.format.find(':'));
      break;
    }
    EXPECT_EQ(layer.format, wanted) << layer.name;
    if (layer.format == name_of(c.dtype)) {
      EXPECT_EQ(layer.weight_bytes, static_cast<std::size_t>(2 * layer.rows * (layer.columns + 1))) << layer.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, GpuEncoder, testing::ValuesIn(cases()), [](const auto& info) { return info.param.name; });

TEST(GpuEncoderEdges, MeanWithoutNormalisingAndEmptySequences) {
  const ModelFolder folder(kConfig);
  folder.write();
  const Encoder encoder = Encoder::load(folder.path(), on_gpu(DType::bf16));
  const auto width = static_cast<std::size_t>(kConfig.hidden);
  const Output found = encode(encoder, Input({0, 3, 0}), false);
  for (std::size_t j = 0; j < width; ++j) {
    EXPECT_EQ(found.embeddings[j], 0.0f);
    EXPECT_EQ(found.embeddings[2 * width + j], 0.0f);
    const float* rows = found.hidden.data() + j;
    EXPECT_NEAR(found.embeddings[width + j], (rows[0] + rows[width] + rows[2 * width]) / 3, 1e-6);
  }
  EXPECT_EQ(encode(encoder, Input({0, 0})).embeddings, std::vector<float>(2 * width, 0.0f));
  EXPECT_TRUE(encode(encoder, Input({})).embeddings.empty());
}

// The bound that workspace() is given may be larger than the longest sequence.
TEST(GpuEncoderEdges, WorkspaceForLongerSequencesSuffices) {
  const ModelFolder folder(kConfig);
  folder.write();
  for (const char* format : {"bfloat16", "nvfp4", "int4_g64"}) {
    const Encoder encoder = Encoder::load(folder.path(), on_gpu(DType::bf16, {{"*", format}}));
    for (const std::vector<int>& lengths : {std::vector<int>{2, 1}, std::vector<int>(40, 5), {66, 3}, {20, 20, 30}}) {
      const Input input(lengths);
      const std::size_t bound = encoder.workspace(input.total(), input.sequences(), kConfig.positions);
      EXPECT_GE(bound, encoder.workspace(input.total(), input.sequences(), input.longest())) << format;
    }
  }
}

// Rows of more than one round of a pooling block, and of pieces that a warp does not divide.
TEST(GpuEncoderEdges, OtherWidths) {
  for (const std::int64_t hidden : {24, 40, 520}) {
    EncoderConfig config = kConfig;
    config.hidden = hidden;
    config.heads = hidden / 8;
    config.intermediate = 56;
    ModelFolder folder(config);
    folder.write();
    const Encoder encoder = Encoder::load(folder.path(), on_gpu(DType::f16));
    const Input input({9, 30});
    const Output found = encode(encoder, input);
    SCOPED_TRACE(hidden);
    const EncoderExpected right = expected(&folder, {}, input, DType::f16);
    right.hidden.expect_right(found.hidden);
    right.embeddings.expect_right(found.embeddings);
  }
}

TEST(GpuEncoderErrors, Load) {
  const ModelFolder folder(kConfig);
  folder.write();
  const auto refused = [&](const EncoderOptions& options, const std::string& message) {
    expect_message([&] { Encoder::load(folder.path(), options); }, message);
  };
  refused(on_gpu(DType::f32), "[encoder] dtype is float32: on a GPU it must be float16 or bfloat16");
  refused(on_gpu(DType::bf16, {{"*.key", "float32"}}),
          "pattern '*.key' asks for float32: on a GPU products are in dtype, bfloat16, or low-bit");
  EncoderConfig config = kConfig;
  config.intermediate = 100;
  const ModelFolder odd(config);
  odd.write();
  expect_message([&] { Encoder::load(odd.path(), on_gpu(DType::bf16)); },
                 "config.json: intermediate_size is 100: on a GPU it must be a multiple of 8");
}

TEST(GpuEncoderErrors, Encode) {
  const ModelFolder folder(kConfig);
  folder.write();
  const Encoder encoder = Encoder::load(folder.path(), on_gpu(DType::bf16));
  Input input({4, 5});
  const DeviceMemory out(4 * 2 * static_cast<std::size_t>(kConfig.hidden));
  const TensorView embeddings = view_of(out, DType::f32, 2, kConfig.hidden);
  const DeviceMemory scratch(encoder.workspace(9, 2, 5));
  Runtime runtime;
  runtime.workspace = {scratch.data(), scratch.bytes()};
  const auto refused = [&](const std::string& message, const TensorView& to, EncoderTimes* times = nullptr) {
    expect_message([&] { encoder.encode(input.id_view(), input.offset_view(), to, {}, true, runtime, times); },
                   message);
  };
  EncoderTimes times;
  refused("times is given: a call on a GPU does not wait for its stages", embeddings, &times);
  std::vector<float> host(2 * static_cast<std::size_t>(kConfig.hidden));
  refused("embeddings must be on the GPU, as the encoder is", TensorView(host.data(), DType::f32, {2, kConfig.hidden}));
  TensorView ids = input.id_view();
  ids.device = Device::cuda;
  expect_message([&] { encoder.encode(ids, input.offset_view(), embeddings, {}, true, runtime); },
                 "token_ids must be on the CPU");
  const DeviceMemory states(4 * 10 * static_cast<std::size_t>(kConfig.hidden));
  TensorView hidden = view_of(states, DType::f32, 9, kConfig.hidden);
  hidden.data = static_cast<std::byte*>(hidden.data) + 4;
  expect_message([&] { encoder.encode(input.id_view(), input.offset_view(), embeddings, hidden, true, runtime); },
                 "[encode] hidden_states must be aligned to 16 bytes");
  runtime.workspace.bytes -= 1;
  refused("; as Encoder::workspace() says", embeddings);
  runtime.workspace.bytes += 1;
  input.ids[3] = 60;
  refused("[encode] token_ids holds 60 at 3: ids are from 0 to 59", embeddings);
  input.ids[3] = -1;
  refused("[encode] token_ids holds -1 at 3", embeddings);
  input.ids[3] = 0;
  input.cu_seqlens[1] = 10;
  refused("cu_seqlens decreases from 10 to 9", embeddings);
}

}  // namespace
}  // namespace heddle::kit
