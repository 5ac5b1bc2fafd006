#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/check.h"
#include "core/dtypes.h"
#include "cuda/backend.h"
#include "heddle/error.h"
#include "heddle/runtime.h"
#include "heddle/transformer.h"
#include "kit/device_mirror.h"
#include "unit/deep_json.h"
#include "unit/encoder_model.h"
#include "unit/model_files.h"
#include "unit/plain_encoder.h"

namespace heddle {
namespace {

using test::max_error;
using test::ModelFolder;
using test::nested_arrays;
using test::nested_objects;
using test::PlainEncoder;
using test::Rows;

// Sizes that no vector length, block or panel divides.
constexpr EncoderConfig kSmall{.hidden = 36,
                               .layers = 2,
                               .heads = 3,
                               .intermediate = 150,
                               .vocabulary = 50,
                               .positions = 40,
                               .token_types = 2,
                               .layer_norm_epsilon = 1e-6f};
const std::vector<int> kLengths = {17, 1, 0, 40, 33, 5, 40, 0};

double exact(double value) { return value; }
float to_f32(float value) { return value; }
float to_bf16(float value) { return bf16_to_f32(f32_to_bf16(value)); }

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

// At most twice the error of the plain computation in the same dtype.
TEST_P(EncoderAccuracy, StaysWithinTwiceThePlainError) {
  const auto [dtype, method] = GetParam();
  const ModelFolder folder(kSmall);
  folder.write();
  const Encoder encoder = Encoder::load(folder.path(), {dtype, method});
  const Input input(kLengths);
  const Output found = encode(encoder, input);

  const PlainEncoder<double> reference(folder, dtype, exact);
  const PlainEncoder<float> plain(folder, dtype, dtype == DType::f32 ? to_f32 : to_bf16);
  std::vector<double> hidden, embeddings;
  std::vector<float> plain_hidden;
  for (std::int64_t i = 0; i < input.sequences(); ++i) {
    const Rows<double> rows = reference(input.sequence(i));
    for (const auto& row : rows) hidden.insert(hidden.end(), row.begin(), row.end());
    for (const auto& row : plain(input.sequence(i))) plain_hidden.insert(plain_hidden.end(), row.begin(), row.end());
    std::vector<double> mean(kSmall.hidden);
    double squares = 0;
    for (std::int64_t j = 0; j < kSmall.hidden; ++j) {
      for (const auto& row : rows) mean[j] += row[j] / rows.size();
      squares += mean[j] * mean[j];
    }
    for (double& value : mean) value /= rows.empty() ? 1.0 : std::sqrt(squares);
    embeddings.insert(embeddings.end(), mean.begin(), mean.end());
  }
  const double bound = 2 * max_error(hidden, plain_hidden) + 1e-6;
  RecordProperty("bound", std::to_string(bound));
  EXPECT_TRUE(max_error(hidden, found.hidden) <= bound) << max_error(hidden, found.hidden) << " > " << bound;
  // Normalised rows of `hidden` have length about 6 before, so their error shrinks.
  EXPECT_TRUE(max_error(embeddings, found.embeddings) <= bound) << max_error(embeddings, found.embeddings);
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

template <class Thrown = Error, class Body>
void expect_message(const Body& body, const std::vector<std::string>& parts) {
  try {
    body();
    FAIL() << "nothing was thrown; expected " << parts.front();
  } catch (const Thrown& error) {
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << part << " is not in: " << error.what();
    }
  }
}

TEST(EncoderErrors, WeightsNameFileAndTensor) {
  const std::string name = "encoder.layer.1.output.dense.weight";
  const auto refused = [&](const auto& spoil, const std::vector<std::string>& parts, DType dtype = DType::f32) {
    ModelFolder folder(kSmall);
    spoil(folder);
    folder.write();
    std::vector<std::string> all = {folder.path()};
    all.insert(all.end(), parts.begin(), parts.end());
    expect_message([&] { Encoder::load(folder.path(), {dtype, ""}); }, all);
  };
  refused([&](ModelFolder& f) { f.tensors.erase(name); }, {"model.safetensors", "tensor '" + name + "' is missing"});
  refused(
      [&](ModelFolder& f) {
        f.tensors[name].shape = {150, 36};
      },
      {name, "has the shape [150, 36]: the configuration needs [36, 150]"});
  refused([&](ModelFolder& f) { f.tensors[name].shape = {36 * 150}; }, {name, "has the shape [5400]"});
  refused([&](ModelFolder& f) { f.tensors[name].values[77] = std::nanf(""); }, {name, "holds nan at element 77"});
  refused([&](ModelFolder& f) { f.tensors[name].values[5] = -std::numeric_limits<float>::infinity(); },
          {name, "holds -inf at element 5"});
  refused([&](ModelFolder& f) { f.tensors["embeddings.LayerNorm.bias"].values[0] = std::nanf(""); },
          {"embeddings.LayerNorm.bias", "holds nan at element 0"});
  // Finite in f32, but infinite once rounded to bf16.
  refused([&](ModelFolder& f) { f.tensors[name].values[5] = std::numeric_limits<float>::max(); },
          {name, "at element 5: weights must be finite in the encoder's dtype"}, DType::bf16);
}

TEST(EncoderErrors, Configuration) {
  const auto refused = [](const char* key, const nlohmann::json& value, const std::string& part) {
    ModelFolder folder(kSmall);
    if (value.is_null()) {
      folder.json.erase(key);
    } else {
      folder.json[key] = value;
    }
    folder.write();
    expect_message([&] { Encoder::load(folder.path()); }, {folder.path() + "/config.json", part});
  };
  refused("hidden_size", nullptr, "has no hidden_size");
  refused("hidden_size", 37, "hidden_size 37 is not a multiple of num_attention_heads 3");
  refused("hidden_size", 0, "hidden_size must be an integer from 1 to");
  refused("num_hidden_layers", -1, "num_hidden_layers must be an integer");
  refused("vocab_size", 1.5, "vocab_size must be an integer");
  refused("vocab_size", "50", "vocab_size must be an integer");
  refused("intermediate_size", std::uint64_t{1} << 63, "intermediate_size must be an integer");
  refused("layer_norm_eps", 0.0, "layer_norm_eps must be a number above 0");
  refused("model_type", "roberta", "model_type must be 'bert'; found 'roberta'");
  refused("hidden_act", "relu", "hidden_act must be 'gelu'; found 'relu'");
  refused("position_embedding_type", "relative_key", "position_embedding_type must be 'absolute'");
}

TEST(EncoderErrors, FilesAndOptions) {
  ModelFolder folder(kSmall);
  expect_message<RuntimeError>([&] { Encoder::load(folder.path()); }, {folder.path() + "/config.json"});
  folder.write();
  std::filesystem::resize_file(folder.path() + "/model.safetensors", 5000);
  expect_message([&] { Encoder::load(folder.path()); }, {folder.path() + "/model.safetensors"});
  std::filesystem::remove(folder.path() + "/model.safetensors");
  expect_message<RuntimeError>([&] { Encoder::load(folder.path()); }, {folder.path() + "/model.safetensors"});
  std::ofstream(folder.path() + "/config.json") << "{";
  expect_message([&] { Encoder::load(folder.path()); }, {"config.json is not a JSON object"});
  for (const std::string& content : {nested_arrays(), nested_objects(), R"({"model_type":)" + nested_arrays() + "}"}) {
    std::ofstream(folder.path() + "/config.json") << content;
    expect_message(
        [&] { Encoder::load(folder.path()); },
        {"[encoder] " + folder.path() + "/config.json nests arrays and objects more than 64 deep, at byte "});
  }
  std::filesystem::resize_file(folder.path() + "/config.json", (16 << 20) + 1);
  expect_message([&] { Encoder::load(folder.path()); }, {"config.json has 16777217 bytes: at most 16777216 are read"});
  expect_message([&] { Encoder::load(folder.path(), {DType::f16, ""}); }, {"dtype is float16"});
  expect_message([&] { Encoder::load(folder.path(), {DType::f32, "fast"}); }, {"method is 'fast'"});
}

TEST(EncoderErrors, Device) {
  const ModelFolder folder(kSmall);
  folder.write();
  EncoderOptions options;
  options.device = Device::cuda;
  expect_message([&] { Encoder::load(folder.path(), options); },
                 {"[encoder] dtype is float32: on a GPU it must be float16 or bfloat16"});
  options.dtype = DType::f16;
  if (!kit::current_gpu().name.empty()) return;  // tests/gpu/encoder_test.cc
  const char* why = cuda::built() ? "this process sees no GPU" : "this heddle was built without CUDA";
  expect_message<RuntimeError>([&] { Encoder::load(folder.path(), options); },
                               {text("[encoder] device is cuda: ", why)});
}

TEST(EncoderErrors, Input) {
  const ModelFolder folder(kSmall);
  folder.write();
  const Encoder encoder = Encoder::load(folder.path());
  const auto refused = [&](const auto& spoil, const std::string& part) {
    Input input({3, 4});
    spoil(input);
    std::vector<float> embeddings(input.sequences() * kSmall.hidden, 42.0f);
    WorkspaceBuffer scratch;
    Runtime runtime;
    runtime.workspace = scratch.get(encoder.workspace(200, 8, 40));
    expect_message(
        [&] {
          encoder.encode(TensorView(input.ids.data(), DType::i32, {input.total()}),
                         TensorView(input.cu_seqlens.data(), DType::i32, {input.sequences() + 1}),
                         TensorView(embeddings.data(), DType::f32, {input.sequences(), kSmall.hidden}), {}, true,
                         runtime);
        },
        {"[encode]", part});
    EXPECT_EQ(embeddings, std::vector<float>(embeddings.size(), 42.0f)) << "written before the check: " << part;
  };
  refused([](Input& i) { i.ids[5] = 50; }, "token_ids holds 50 at 5: ids are from 0 to 49");
  refused([](Input& i) { i.ids[6] = -1; }, "token_ids holds -1 at 6");
  refused([](Input& i) { i = Input({3, 41}); }, "sequence 1 has 41 tokens: the position table ends at 40");
  refused([](Input& i) { i.cu_seqlens = {1, 3, 7}; }, "cu_seqlens begins with 1");
  refused([](Input& i) { i.cu_seqlens = {0, 8, 7}; }, "cu_seqlens decreases from 8 to 7 at sequence 1");
  refused([](Input& i) { i.cu_seqlens = {0, 3, 6}; }, "cu_seqlens ends with 6: it must end with 7");
  refused([](Input& i) { i.cu_seqlens = {0, 3, INT32_MIN}; }, "cu_seqlens decreases");
  refused(
      [](Input& i) {
        i.cu_seqlens = {};
        i.cu_seqlens.resize(1);
      },
      "cu_seqlens ends with 0: it must end with 7");
}

TEST(EncoderErrors, ViewsAndWorkspace) {
  const ModelFolder folder(kSmall);
  folder.write();
  const Encoder encoder = Encoder::load(folder.path());
  const Input input({3, 4});
  std::vector<float> embeddings(2 * kSmall.hidden), hidden(7 * kSmall.hidden);
  const std::size_t bytes = encoder.workspace(7, 2, 4);
  WorkspaceBuffer scratch;
  Runtime runtime;
  runtime.workspace = {scratch.get(bytes).data, bytes};
  const TensorView ids(input.ids.data(), DType::i32, {7}), offsets(input.cu_seqlens.data(), DType::i32, {3});
  const TensorView out(embeddings.data(), DType::f32, {2, kSmall.hidden});
  const TensorView wrong(embeddings.data(), DType::f32, {1, kSmall.hidden});
  const TensorView states(hidden.data(), DType::f32, {7, kSmall.hidden});
  encoder.encode(ids, offsets, out, states, true, runtime);
  expect_message([&] { encoder.encode({}, offsets, out, {}, true, runtime); }, {"token_ids is missing"});
  expect_message([&] { encoder.encode(ids, offsets, wrong, {}, true, runtime); },
                 {"embeddings is [1, 36]: it must be [2, 36]"});
  expect_message([&] { encoder.encode(ids, offsets, out, out, true, runtime); },
                 {"hidden_states is [2, 36]: it must be [7, 36]"});
  expect_message([&] { encoder.encode(out, offsets, out, {}, true, runtime); }, {"token_ids has 2 dimensions"});
  const TensorView strided(input.ids.data(), DType::i32, {3}, {2});
  expect_message([&] { encoder.encode(strided, offsets, out, {}, true, runtime); }, {"token_ids must be contiguous"});
  runtime.workspace.bytes = 1000;  // what is needed may be less than what suffices for any lengths
  expect_message([&] { encoder.encode(ids, offsets, out, states, true, runtime); },
                 {"the workspace has 1000 bytes: this call needs ", "; as Encoder::workspace() says"});
  runtime.workspace = {};
  expect_message([&] { encoder.encode(ids, offsets, out, states, true, runtime); }, {"the workspace has 0 bytes"});
  expect_message([&] { encoder.workspace(100, 2, 40); }, {"2 sequences of at most 40 tokens cannot hold 100"});
  expect_message([&] { encoder.workspace(100, 2, 41); }, {"longest is 41"});
}

}  // namespace
}  // namespace heddle
