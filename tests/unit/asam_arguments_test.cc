// What layers of adaptive sparse attention refuse, and in which words.
#include <functional>
#include <limits>

#include <gtest/gtest.h>

#include "heddle/asam.h"
#include "heddle/error.h"
#include "kit/messages.h"
#include "unit/asam_model.h"
#include "unit/checkpoint_files.h"

namespace heddle {
namespace {

using kit::AsamTensors;
using kit::expect_message;
using test::asam_config;
using test::asam_tensors;
using test::views_of;

TEST(AsamArguments, Configuration) {
  const auto refused = [](const std::function<void(AsamConfig&)>& change, const std::string& message) {
    AsamConfig config = asam_config();
    const AsamTensors tensors = asam_tensors(config);
    change(config);
    expect_message([&] { AsamLayer(config, views_of(tensors)); }, "[asam_layer] " + message);
  };
  refused([](auto& c) { c.dim = 0; }, "dim is 0: it must be from 1 to 16777216");
  refused([](auto& c) { c.num_heads = -1; }, "num_heads is -1: it must be from 1 to 16777216");
  refused([](auto& c) { c.dim_head = 257; }, "dim_head is 257: it must be from 1 to 256");
  refused([](auto& c) { c.num_heads = 1 << 20; },
          "num_heads is 1048576 and dim_head 20: their product must be at most 16777216");
  refused([](auto& c) { c.pattern_type = static_cast<AsamPattern>(9); },
          "pattern_type is 9: it must be local, strided, random, clustered, hierarchical or adaptive");
  refused([](auto& c) { c.gate = static_cast<AsamGate>(2); }, "gate is 2: it must be hard or soft");
  refused([](auto& c) { c.window_size = 0; }, "window_size is 0: it must be from 1 to 2147483647");
  refused([](auto& c) { c.stride = 0; }, "stride is 0: it must be from 1 to 2147483647");
  refused([](auto& c) { c.num_clusters = 0; }, "num_clusters is 0: it must be from 1 to 16777216");
  refused([](auto& c) { c.gate_hidden_dim = 1; }, "gate_hidden_dim is 1: it must be from 2 to 16777216");
  refused([](auto& c) { c.num_random = 0; }, "num_random is 0: it must be from 1 to 2147483647");
  refused([](auto& c) { c.seed = -1; }, "seed is -1: it must not be negative");
  refused([](auto& c) { c.block_size = 48; }, "block_size is 48: it must be 16, 32, 64 or 128");
  refused([](auto& c) { c.scales = {1, 2, 3, 4, 5}; }, "scales has 5 strides: it must have from 1 to 4");
  refused([](auto& c) { c.scales = {4, 0}; }, "an element of scales is 0: it must be from 1 to 2147483647");
  refused([](auto& c) { c.compat = "asam"; },
          "compat is 'asam': the public layer's own formulae are computed in Python alone, by heddle.compat.asam");
  refused([](auto& c) { c.compat = "flash"; }, "compat is 'flash': it must be empty");
  refused([](auto& c) { c.use_adaptive_gate = false; },
          "pattern_type is adaptive and use_adaptive_gate false: the gate's features choose the pattern");
  expect_message([] { asam_pattern_named("dilated"); },
                 "[asam] pattern_type is 'dilated': it must be one of local, strided, random, clustered, hierarchical, "
                 "adaptive");
  expect_message([] { asam_gate_named("no"); }, "[asam] gate is 'no': it must be one of hard, soft");
}

TEST(AsamArguments, State) {
  const AsamConfig config = asam_config();
  const AsamTensors tensors = asam_tensors(config);
  const auto refused = [&](const std::function<void(AsamState&)>& change, const std::string& message) {
    AsamState state = views_of(tensors);
    change(state);
    expect_message([&] { AsamLayer(config, state); }, "[asam_layer] " + message);
  };
  refused([](auto& s) { s.erase("norm.bias"); }, "norm.bias is missing: it must be [36]");
  refused([](auto& s) { s.erase("adaptive_attn.gate.sparse_threshold"); },
          "adaptive_attn.gate.sparse_threshold is missing: it must be [3]");
  refused([](auto& s) { s["ffn.0.weight"].shape[0] = 143; },
          "ffn.0.weight is [143, 36]: it must be [144, 36] for this configuration");
  refused([](auto& s) { s["selection.head_bias"].device = Device::cuda; },
          "selection.head_bias is on a GPU: weights are given in the CPU's memory");
  refused([](auto& s) { s["norm.weight"].dtype = DType::i32; },
          "norm.weight is int32: it must be float32, float16 or bfloat16");
  const float nan[] = {std::numeric_limits<float>::quiet_NaN()};
  refused([&](auto& s) { s["adaptive_attn.gate.gate_temp"] = TensorView(nan, DType::f32, {1}); },
          "adaptive_attn.gate.gate_temp holds nan at element 0: weights must be finite");
  refused([](auto& s) { s["selection.scale_weights"] = s["norm.bias"]; },
          "'selection.scale_weights' is no tensor of a layer of this configuration");
  refused([](auto& s) { s["_pattern_modules.local_64._cached_pattern"] = s["norm.bias"]; },
          "'_pattern_modules.local_64._cached_pattern' is what the public package's layer keeps of its patterns");
  // With the gate the layer's own projections are there for their names alone.
  AsamState state = views_of(tensors);
  state.erase("to_qkv.weight");
  EXPECT_NO_THROW(AsamLayer(config, state));
  expect_message([&] { AsamEncoder(config, 0, state); }, "[asam_encoder] num_layers is 0: it must be at least 1");
  expect_message([&] { AsamEncoder(config, 1, state); }, "[asam_encoder] layers.0.norm.weight is missing");
}

TEST(AsamArguments, Files) {
  const AsamConfig config = asam_config();
  const AsamTensors tensors = asam_tensors(config);
  lowbit::test::FileBytes file;
  for (const auto& [name, tensor] : tensors) file.add("model.3." + name, "F32", tensor.shape, tensor.values);
  const std::string bytes = file.bytes();
  const SafeTensors open = SafeTensors::parse(bytes.data(), bytes.size());
  EXPECT_EQ(AsamLayer(config, open, "model.3.").weight_bytes(), AsamLayer(config, views_of(tensors)).weight_bytes());
  expect_message([&] { AsamLayer(config, open, "model.4."); },
                 "[asam_layer] bytes in memory has no tensor whose name begins with 'model.4.'");
  EXPECT_THROW(AsamLayer::load(config, "/no/such/file"), RuntimeError);
}

TEST(AsamArguments, Calls) {
  const auto refused = [](bool adaptive,
                          const std::function<void(TensorView&, TensorView&, AsamOptions&, AsamInfo&)>& change,
                          const std::string& message) {
    AsamConfig config = asam_config();
    config.use_adaptive_gate = adaptive;
    if (!adaptive) config.pattern_type = AsamPattern::local;
    const AsamTensors tensors = asam_tensors(config);
    const AsamLayer layer(config, views_of(tensors));
    std::vector<float> memory(static_cast<std::size_t>(2 * 40 * config.dim));
    std::vector<float> result(memory.size(), 5);
    TensorView x(memory.data(), DType::f32, {2, 40, config.dim}), y(result.data(), DType::f32, {2, 40, config.dim});
    AsamOptions options;
    AsamInfo info;
    change(x, y, options, info);
    WorkspaceBuffer buffer;
    const Runtime runtime{buffer.get(layer.workspace(2, 40)), nullptr, nullptr};
    expect_message([&] { layer.forward(x, y, options, info, runtime); }, "[asam_layer] " + message);
    EXPECT_EQ(result, std::vector<float>(memory.size(), 5));
  };
  const std::vector<float> floats(2 * 3 * 40);
  const std::int32_t few[] = {40}, zero[] = {40, 0}, many[] = {41, 1};
  refused(
      true, [](auto& x, auto&, auto&, auto&) { x.device = Device::cuda; },
      "x is on a GPU: these layers run on the CPU alone; on GPUs heddle.nn.ASAMLayer does, in Python");
  refused(
      true, [](auto&, auto& y, auto&, auto&) { y.device = Device::cuda; }, "y is on a GPU");
  refused(
      true, [](auto& x, auto&, auto&, auto&) { x.dtype = DType::bf16; }, "x is bfloat16: it must be float32");
  refused(
      true, [](auto& x, auto&, auto&, auto&) { x.shape[2] = 35; },
      "x is [2, 40, 35]: it must be [B, T, 36], the configuration's dim");
  refused(
      true, [](auto& x, auto&, auto&, auto&) { x.shape[1] = 0; },
      "x is [2, 0, 36]: it must be [B, T, 36], B and T from 1 up");
  refused(
      true, [](auto& x, auto&, auto&, auto&) { x.stride[2] = 2; }, "x's last dimension has stride 2: it must be 1");
  refused(
      true, [](auto&, auto& y, auto&, auto&) { y.shape[1] = 39; }, "y is [2, 39, 36]: it must be [2, 40, 36], as x");
  refused(
      true, [](auto&, auto& y, auto&, auto&) { y.stride[0] = 0; }, "y is an output whose elements overlap");
  refused(
      true, [&](auto&, auto&, auto& o, auto&) { o.lengths = TensorView(few, DType::i32, {1}); },
      "lengths is [1]: it must be [B], [2]");
  refused(
      true, [&](auto&, auto&, auto& o, auto&) { o.lengths = TensorView(zero, DType::i32, {2}); },
      "lengths[1] is 0: it must be from 1 to T, 40");
  refused(
      true, [&](auto&, auto&, auto& o, auto&) { o.lengths = TensorView(many, DType::i32, {2}); },
      "lengths[0] is 41: it must be from 1 to T, 40");
  refused(
      true,
      [&](auto&, auto&, auto&, auto& i) {
        i.gate_values = TensorView(floats.data(), DType::f32, {2, 3, 39});
      },
      "gate_values is [2, 3, 39]: it must be [2, 3, 40]");
  refused(
      true,
      [&](auto&, auto&, auto&, auto& i) {
        i.patterns = TensorView(floats.data(), DType::f32, {2, 3});
      },
      "patterns is float32: it must be int32");
  refused(
      true, [&](auto&, auto& y, auto&, auto& i) { i.sparse_ratio = TensorView(y.data, DType::f32, {1}); },
      "y and sparse_ratio share memory: outputs must be apart");
  refused(
      false,
      [&](auto&, auto&, auto&, auto& i) {
        i.confidence = TensorView(floats.data(), DType::f32, {2, 3});
      },
      "confidence is given and use_adaptive_gate is false: there is no gate");
  refused(
      false,
      [&](auto&, auto&, auto&, auto& i) {
        i.patterns = TensorView(floats.data(), DType::i32, {2, 3});
      },
      "patterns is given and pattern_type is not adaptive: all heads have the one that it names");
}

TEST(AsamArguments, Workspace) {
  const AsamConfig config = asam_config();
  const AsamTensors tensors = asam_tensors(config);
  const AsamLayer layer(config, views_of(tensors));
  expect_message([&] { layer.workspace(0, 5); }, "[asam_layer_workspace] batch is 0: it must be at least 1");
  expect_message([&] { layer.workspace(1, 0); }, "[asam_layer_workspace] length is 0: it must be at least 1");
  expect_message([&] { layer.workspace(1 << 16, 1 << 15); },
                 "[asam_layer_workspace] batch is 65536 and length 32768: their product must be below 2^31");
  std::vector<float> x(static_cast<std::size_t>(config.dim));
  const TensorView view(x.data(), DType::f32, {1, 1, config.dim});
  expect_message([&] { layer.forward(view, view, {}, {}, {}); }, "AsamLayer::workspace() says how many");
}

}  // namespace
}  // namespace heddle
