#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/dtypes.h"
#include "heddle/runtime.h"
#include "heddle/transformer.h"
#include "unit/encoder_expected.h"
#include "unit/encoder_model.h"
#include "unit/model_files.h"

namespace heddle {
namespace {

using test::EncoderExpected;
using test::kSmall;
using test::ModelFolder;

const std::vector<int> kLengths = {17, 1, 0, 40, 33, 5, 40, 0};

struct Input : test::Input {
  explicit Input(const std::vector<int>& lengths, std::uint32_t seed = 7)
      : test::Input(lengths, kSmall.vocabulary, seed) {}
};

struct Output {
  std::vector<float> embeddings, hidden;
  EncoderTimes times;
};

Output encode(const Encoder& encoder, const Input& input, Executor* executor = nullptr, bool normalize = true,
              int filling = 0) {
  Output out;
  out.embeddings.resize(input.sequences() * kSmall.hidden);
  out.hidden.resize(input.total() * kSmall.hidden);
  Runtime runtime;
  runtime.executor = executor;
  WorkspaceBuffer scratch;
  const std::size_t bytes = encoder.workspace(input.total(), input.sequences(), input.longest(), runtime);
  runtime.workspace = {scratch.get(bytes).data, bytes};  // no byte more than the query says
  if (bytes > 0) std::memset(runtime.workspace.data, filling, bytes);
  encoder.encode(TensorView(input.ids.data(), DType::i32, {input.total()}),
                 TensorView(input.cu_seqlens.data(), DType::i32, {input.sequences() + 1}),
                 TensorView(out.embeddings.data(), DType::f32, {input.sequences(), kSmall.hidden}),
                 TensorView(out.hidden.data(), DType::f32, {input.total(), kSmall.hidden}), normalize, runtime,
                 &out.times);
  return out;
}

class EncoderAccuracy : public testing::TestWithParam<std::tuple<DType, std::string>> {};

TEST_P(EncoderAccuracy, IsWithinTheRule) {
  const auto [dtype, method] = GetParam();
  const ModelFolder folder(kSmall);
  folder.write();
  const Encoder encoder = Encoder::load(folder.path(), {dtype, method});
  const Input input(kLengths);
  const Output found = encode(encoder, input);
  const EncoderExpected expected(folder, dtype, dtype, input);
  expected.hidden.expect_right(found.hidden);
  expected.embeddings.expect_right(found.embeddings);
  for (std::int64_t i = 0; i < input.sequences(); ++i) {
    double squares = 0;
    for (std::int64_t j = 0; j < kSmall.hidden; ++j) {
      squares += std::pow(found.embeddings[i * kSmall.hidden + j], 2);
    }
    EXPECT_NEAR(squares, kLengths[i] == 0 ? 0.0 : 1.0, 1e-5) << "sequence " << i;
  }
  const double seconds = found.times.embedding + found.times.attention + found.times.linear +
                         found.times.norm_and_activation + found.times.pooling;
  for (const double stage : {found.times.embedding, found.times.attention, found.times.linear,
                             found.times.norm_and_activation, found.times.pooling}) {
    EXPECT_GT(stage, 0.0);
    EXPECT_LT(stage, seconds);
  }
}

INSTANTIATE_TEST_SUITE_P(Encoder, EncoderAccuracy,
                         testing::Combine(testing::Values(DType::f32, DType::bf16),
                                          testing::Values("", "flash", "baseline")),
                         [](const auto& info) {
                           const std::string method = std::get<1>(info.param);
                           return std::string(name_of(std::get<0>(info.param))) + "_" +
                                  (method.empty() ? "free" : method);
                         });

class EncoderBits : public testing::TestWithParam<DType> {};

TEST_P(EncoderBits, DoNotDependOnNeighboursThreadsOrTheWorkspace) {
  const ModelFolder folder(kSmall);
  folder.write();
  const Encoder encoder = Encoder::load(folder.path(), {GetParam(), ""});
  const Input input(kLengths);
  const auto one = make_thread_pool(1), three = make_thread_pool(3);
  const Output together = encode(encoder, input, one.get());
  EXPECT_EQ(encode(encoder, input, three.get()).hidden, together.hidden);
  const Output over_nan = encode(encoder, input, one.get(), true, 0xFF);
  EXPECT_EQ(over_nan.hidden, together.hidden);
  EXPECT_EQ(over_nan.embeddings, together.embeddings);
  for (std::int64_t i = 0; i < input.sequences(); ++i) {
    Input alone({});
    alone.ids = input.sequence(i);
    alone.cu_seqlens.push_back(static_cast<std::int32_t>(alone.ids.size()));
    const Output found = encode(encoder, alone, three.get());
    EXPECT_TRUE(
        std::equal(found.embeddings.begin(), found.embeddings.end(), together.embeddings.begin() + i * kSmall.hidden))
        << "sequence " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Encoder, EncoderBits, testing::Values(DType::f32, DType::bf16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST(Encoder, MeanWithoutNormalising) {
  const ModelFolder folder(kSmall);
  folder.write();
  const Encoder encoder = Encoder::load(folder.path());
  const Output found = encode(encoder, Input({3}), nullptr, false);
  for (std::int64_t j = 0; j < kSmall.hidden; ++j) {
    const float* rows = found.hidden.data() + j;
    EXPECT_NEAR(found.embeddings[j], (rows[0] + rows[kSmall.hidden] + rows[2 * kSmall.hidden]) / 3, 1e-6);
  }
}

TEST(Encoder, ReadsEveryWeightFormat) {
  ModelFolder folder(kSmall);
  for (auto& [name, tensor] : folder.tensors) {
    for (float& value : tensor.values) value = bf16_to_f32(f32_to_bf16(value));
  }
  folder.write("F32");
  const Output f32 = encode(Encoder::load(folder.path()), Input(kLengths));
  folder.write("BF16", "bert.");
  EXPECT_EQ(encode(Encoder::load(folder.path()), Input(kLengths)).hidden, f32.hidden);
  for (auto& [name, tensor] : folder.tensors) {
    for (float& value : tensor.values) value = f16_to_f32(f32_to_f16(value));
  }
  folder.write("F32");
  const Output rounded = encode(Encoder::load(folder.path()), Input(kLengths));
  folder.write("F16");
  EXPECT_EQ(encode(Encoder::load(folder.path()), Input(kLengths)).hidden, rounded.hidden);
}

TEST(Encoder, WeightBytesFollowTheDType) {
  const ModelFolder folder(kSmall);
  folder.write();
  std::size_t matrices = 0, vectors = 0;
  for (const auto& [name, tensor] : folder.tensors) {
    (tensor.shape.size() == 2 ? matrices : vectors) += tensor.values.size();
  }
  // Repacked matrices may be padded, so the bytes are bounded only from below.
  EXPECT_GE(Encoder::load(folder.path()).weight_bytes(), 4 * matrices + 4 * vectors);
  const std::size_t bf16 = Encoder::load(folder.path(), {DType::bf16, ""}).weight_bytes();
  EXPECT_GE(bf16, 2 * matrices + 4 * vectors);
  EXPECT_LT(bf16, Encoder::load(folder.path()).weight_bytes());
}

TEST(Encoder, NothingToEncode) {
  const ModelFolder folder(kSmall);
  folder.write();
  const Encoder encoder = Encoder::load(folder.path());
  EXPECT_TRUE(encode(encoder, Input({})).embeddings.empty());
  EXPECT_EQ(encode(encoder, Input({0, 0})).embeddings, std::vector<float>(2 * kSmall.hidden, 0.0f));
}

// Of any lengths within the bounds, also where attention cuts its tiles to keep both workers busy.
TEST(Encoder, WorkspaceSufficesForAnyLengths) {
  EncoderConfig config = kSmall;
  config.positions = 200;
  const ModelFolder folder(config);
  folder.write();
  const Encoder encoder = Encoder::load(folder.path());
  const auto two = make_thread_pool(2);
  for (const std::vector<int>& lengths :
       std::vector<std::vector<int>>{{200}, {197, 1, 1, 1}, {50, 50, 50, 50}, {1, 1, 198}, {0, 100, 0, 100}}) {
    const Input input(lengths);
    std::vector<float> embeddings(input.sequences() * kSmall.hidden);
    Runtime runtime{{}, two.get(), nullptr};
    WorkspaceBuffer scratch;
    const std::size_t bytes = encoder.workspace(200, 4, 200, runtime);
    runtime.workspace = {scratch.get(bytes).data, bytes};
    encoder.encode(TensorView(input.ids.data(), DType::i32, {200}),
                   TensorView(input.cu_seqlens.data(), DType::i32, {input.sequences() + 1}),
                   TensorView(embeddings.data(), DType::f32, {input.sequences(), kSmall.hidden}), {}, true, runtime);
    EXPECT_EQ(embeddings, encode(encoder, input).embeddings);
  }
}

}  // namespace
}  // namespace heddle
