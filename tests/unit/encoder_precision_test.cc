// The encoder with linear layers in low-bit formats and mixed precisions.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <ostream>
#include <tuple>

#include <gtest/gtest.h>

#include "checkpoint/quantize_rules.h"
#include "core/dtypes.h"
#include "heddle/error.h"
#include "heddle/transformer.h"
#include "unit/encoder_expected.h"
#include "unit/encoder_model.h"

namespace heddle {
namespace {

using test::EncoderExpected;
using test::hold;
using test::Input;
using test::kConfig;
using test::kLengths;
using test::ModelFolder;

struct Output {
  std::vector<float> embeddings, hidden;
};

Output encode(const Encoder& encoder, const Input& input, Executor* executor = nullptr) {
  Output out;
  const std::int64_t total = input.total();
  out.embeddings.resize(static_cast<std::size_t>(input.sequences() * kConfig.hidden));
  out.hidden.resize(static_cast<std::size_t>(total * kConfig.hidden));
  Runtime runtime;
  runtime.executor = executor;
  WorkspaceBuffer scratch;
  const std::size_t bytes = encoder.workspace(total, input.sequences(), input.longest(), runtime);
  runtime.workspace = {scratch.get(bytes).data, bytes};
  encoder.encode(input.id_view(), input.offset_view(),
                 TensorView(out.embeddings.data(), DType::f32, {input.sequences(), kConfig.hidden}),
                 TensorView(out.hidden.data(), DType::f32, {total, kConfig.hidden}), true, runtime);
  return out;
}

struct Case {
  const char* name;
  DType dtype;
  std::vector<lowbit::LayerRule> rules;
  friend void PrintTo(const Case& c, std::ostream* to) { *to << c.name; }
};

std::vector<Case> cases() {
  std::vector<Case> out;
  static std::vector<std::string> names;
  names.reserve(64);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const char* format :
         {"nvfp4", "mxfp4", "int4_g64", "int4_g128_zp", "nf4", "fp4_bnb", "int8_row", "fp8_row", "e2m1_row"}) {
      names.push_back(std::string(format) + "_" + name_of(dtype));
      out.push_back({names.back().c_str(), dtype, {{"*", format}}});
    }
  }
  out.push_back(
      {"mixed_float32",
       DType::f32,
       {{"*.query", "nvfp4:mse"}, {"*.key", "float32"}, {"*layer.1.*", "bfloat16"}, {"*.output.dense", "int8_row"}}});
  out.push_back({"mixed_bfloat16",
                 DType::bf16,
                 {{"*.value", "int4_g32"},
                  {"*.query", "float32"},
                  {"*layer.1.*", "float32"},
                  {"*0.output.dense", "mxfp4:even"}}});
  return out;
}

class EncoderPrecision : public testing::TestWithParam<Case> {};

// The plain computation has the same weights, in the encoder's dtype, or in bfloat16 where products of some layers are.
TEST_P(EncoderPrecision, IsWithinTheRule) {
  ModelFolder folder(kConfig);
  folder.write();
  EncoderOptions options;
  options.dtype = GetParam().dtype;
  options.layers = GetParam().rules;
  const Encoder encoder = Encoder::load(folder.path(), options);
  const Input input(kLengths);
  const Output found = encode(encoder, input);

  hold(&folder, GetParam().rules);
  // Weights are what they are held as already; embeddings are held in the encoder's dtype.
  for (auto& [name, tensor] : folder.tensors) {
    const bool bf16 = options.dtype == DType::bf16;
    if (bf16 && name.starts_with("embeddings.") && tensor.shape.size() == 2) {
      for (float& value : tensor.values) value = bf16_to_f32(f32_to_bf16(value));
    }
  }
  const bool in_f32 =
      options.dtype == DType::f32 && std::none_of(options.layers.begin(), options.layers.end(),
                                                  [](const auto& rule) { return rule.format == "bfloat16"; });
  const EncoderExpected expected(folder, DType::f32, in_f32 ? DType::f32 : DType::bf16, input);
  expected.hidden.expect_right(found.hidden);
  expected.embeddings.expect_right(found.embeddings);

  std::size_t linear = 0;
  for (const EncoderLayerInfo& layer : encoder.layers()) {
    linear += layer.weight_bytes;
    std::string wanted = name_of(options.dtype);
    for (const lowbit::LayerRule& rule : GetParam().rules) {
      if (!lowbit::matches(rule.pattern, layer.name)) continue;
      wanted = rule.format.substr(0, rule.format.find(':'));
      break;
    }
    EXPECT_EQ(layer.format, wanted) << layer.name;
  }
  EXPECT_EQ(encoder.layers().size(), 12u);
  EXPECT_LT(linear, encoder.weight_bytes());
}

TEST_P(EncoderPrecision, BitsDoNotDependOnNeighboursOrThreads) {
  const ModelFolder folder(kConfig);
  folder.write();
  EncoderOptions options;
  options.dtype = GetParam().dtype;
  options.layers = GetParam().rules;
  const Encoder encoder = Encoder::load(folder.path(), options);
  const Input input(kLengths);
  const auto one = make_thread_pool(1), three = make_thread_pool(3);
  const Output together = encode(encoder, input, one.get());
  EXPECT_EQ(encode(encoder, input, three.get()).hidden, together.hidden);
  for (std::int64_t i = 0; i < input.sequences(); ++i) {
    Input alone({});
    alone.ids = input.sequence(i);
    alone.cu_seqlens.push_back(static_cast<std::int32_t>(alone.ids.size()));
    const Output found = encode(encoder, alone, three.get());
    EXPECT_TRUE(
        std::equal(found.embeddings.begin(), found.embeddings.end(), together.embeddings.begin() + i * kConfig.hidden))
        << "sequence " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(, EncoderPrecision, testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(EncoderPrecisions, ReadsWhatQuantizeCheckpointWrites) {
  const ModelFolder folder(kConfig);
  folder.write("F32", "bert.");
  const Input input(kLengths);
  for (const char* format : {"mxfp4", "int4_g64_zp", "int8_row", "fp8_row", "nf4", "nvfp4"}) {
    const std::string out = folder.path() + "/" + format;
    lowbit::QuantizeCheckpointOptions quantize;
    quantize.format = std::string(format) + ":mse";
    quantize.layers = {{"*.1.output.dense", "keep"}};
    ASSERT_EQ(quantize_checkpoint(folder.path(), out, quantize).layers.size(), 11u);
    const Encoder stored = Encoder::load(out);
    EncoderOptions options;
    options.layers = {{"*.1.output.dense", "float32"}, {"*", quantize.format}};
    const Encoder on_load = Encoder::load(folder.path(), options);
    EXPECT_EQ(stored.weight_bytes(), on_load.weight_bytes());
    const Output a = encode(stored, input), b = encode(on_load, input);
    if (std::string(format) != "nvfp4") {
      EXPECT_EQ(a.hidden, b.hidden) << format;
    } else {  // whose global scales are shared and powers of two in a checkpoint
      double dot = 0, all = 0;
      for (std::size_t i = 0; i < a.embeddings.size(); ++i) {
        dot += static_cast<double>(a.embeddings[i]) * b.embeddings[i];
        all += static_cast<double>(a.embeddings[i]) * a.embeddings[i];
      }
      EXPECT_GT(dot, 0.98 * all);
    }
    // As float32 again: the same weights, other products.
    options.layers = {{"*", "float32"}};
    const Encoder widened = Encoder::load(out, options);
    EXPECT_GT(widened.weight_bytes(), stored.weight_bytes());
    const Output c = encode(widened, input);
    for (std::size_t i = 0; i < c.hidden.size(); ++i) ASSERT_NEAR(c.hidden[i], a.hidden[i], 2e-4) << format;
    // Not quantised twice.
    options.layers = {{"*.query", "int4_g32"}};
    try {
      Encoder::load(out, options);
      FAIL() << "taken";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("weights are not quantised twice"), std::string::npos) << error.what();
    }
  }
}

TEST(EncoderPrecisions, WeightBytesAreThoseOfTheFormats) {
  const ModelFolder folder(kConfig);
  folder.write();
  const std::size_t weights = 2 * (4 * 128 * 128 + 2 * 128 * 256), bias = 2 * (5 * 128 + 256) * 4;
  const auto linear_bytes = [&](const char* format) {
    EncoderOptions options;
    options.layers = {{"*", format}};
    std::size_t bytes = 0;
    for (const EncoderLayerInfo& layer : Encoder::load(folder.path(), options).layers()) bytes += layer.weight_bytes;
    return bytes;
  };
  // Packing pads a little.
  const auto expect_bytes = [&](const char* format, std::size_t bytes) {
    EXPECT_GE(linear_bytes(format), bytes) << format;
    EXPECT_LE(linear_bytes(format), bytes + bytes / 25) << format;
  };
  expect_bytes("int4_g128", weights / 2 + weights / 128 * 2 + bias);
  expect_bytes("mxfp4", weights / 2 + weights / 32 + bias);
  expect_bytes("nvfp4", weights / 2 + weights / 16 + bias);
  EXPECT_GE(linear_bytes("bfloat16"), 2 * weights + bias);
  EXPECT_GE(linear_bytes("float32"), 4 * weights + bias);
}

TEST(EncoderPrecisions, Errors) {
  const ModelFolder folder(kConfig);
  folder.write();
  const auto refused = [&](std::vector<lowbit::LayerRule> rules, const std::string& message) {
    EncoderOptions options;
    options.layers = std::move(rules);
    try {
      Encoder::load(folder.path(), options);
      FAIL() << "taken: " << message;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
  };
  refused({{"*", "int3"}}, "format is 'int3': it must be one of");
  refused({{"*", "nvfp4:best"}}, "best");
  refused({{"*.quary", "nvfp4"}}, "pattern '*.quary' decides over no layer");
  refused({{"*", "nf4_b256"}},
          "model.safetensors: tensor 'encoder.layer.0.attention.self.query.weight' is [128, 128]: K = 128 is no "
          "multiple of 256");
}

TEST(ChoosePrecisions, MeetsTheErrorWithAsFewBytesAsItFinds) {
  const ModelFolder folder(kConfig);
  folder.write();
  const Input input({20, 31, 9});
  const Output exact = encode(Encoder::load(folder.path()), input);
  std::size_t last = 0;
  for (const double error : {0.0, 0.02, 0.1, 10.0}) {
    PrecisionOptions options;
    options.error = error;
    const PrecisionChoice choice = choose_precisions(folder.path(), input.id_view(), input.offset_view(), options);
    EXPECT_LE(choice.error, error);
    ASSERT_EQ(choice.layers.size(), 8u);
    ASSERT_EQ(choice.trials.size(), 32u);
    EncoderOptions chosen;
    chosen.layers = choice.layers;
    const Encoder encoder = Encoder::load(folder.path(), chosen);
    EXPECT_EQ(encoder.weight_bytes(), choice.weight_bytes);
    const Output found = encode(encoder, input);
    double noise = 0, signal = 0;
    for (std::size_t i = 0; i < found.embeddings.size(); ++i) {
      const double d = static_cast<double>(found.embeddings[i]) - exact.embeddings[i];
      noise += d * d;
      signal += static_cast<double>(exact.embeddings[i]) * exact.embeddings[i];
    }
    EXPECT_NEAR(std::sqrt(noise / signal), choice.error, 1e-9);
    if (last != 0) {
      EXPECT_LT(choice.weight_bytes, last) << error;
    }
    last = choice.weight_bytes;
    for (const lowbit::LayerRule& rule : choice.layers) {
      if (error == 0) {
        EXPECT_EQ(rule.format, "float32");
      }
      if (error == 10) {
        EXPECT_TRUE(rule.format == "nvfp4:mse" || rule.format == "int4_g32:mse") << rule.format;
      }
    }
    for (const PrecisionChoice::Trial& trial : choice.trials) EXPECT_GT(trial.error, 0);
  }
}

TEST(ChoosePrecisions, Errors) {
  const ModelFolder folder(kConfig);
  folder.write();
  const Input input({20}), empty({});
  PrecisionOptions options;
  options.error = -1;
  EXPECT_THROW(choose_precisions(folder.path(), input.id_view(), input.offset_view(), options), Error);
  options.error = std::nan("");
  EXPECT_THROW(choose_precisions(folder.path(), input.id_view(), input.offset_view(), options), Error);
  options = {};
  EXPECT_THROW(choose_precisions(folder.path(), empty.id_view(), empty.offset_view(), options), Error);
  options.formats = {"nvfp5"};
  EXPECT_THROW(choose_precisions(folder.path(), input.id_view(), input.offset_view(), options), Error);
  options.formats = {"nf4_b512"};
  EXPECT_THROW(choose_precisions(folder.path(), input.id_view(), input.offset_view(), options), Error);
}

}  // namespace
}  // namespace heddle
