// What the encoder refuses: models, options, text, tensors.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/check.h"
#include "cuda/backend.h"
#include "heddle/error.h"
#include "heddle/runtime.h"
#include "heddle/transformer.h"
#include "kit/device_mirror.h"
#include "unit/deep_json.h"
#include "unit/encoder_model.h"
#include "unit/model_files.h"

namespace heddle {
namespace {

using test::kSmall;
using test::ModelFolder;
using test::nested_arrays;
using test::nested_objects;

struct Input : test::Input {
  explicit Input(const std::vector<int>& lengths) : test::Input(lengths, kSmall.vocabulary) {}
};

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
  const auto over = [](const TensorView& memory, std::int64_t rows) {
    return TensorView(memory.data, DType::f32, {rows, kSmall.hidden});
  };
  std::vector<std::int32_t> many(1000);
  const TensorView few_ids(many.data(), DType::i32, {7});
  const TensorView bounds(many.data() + 20, DType::i32, {3});
  std::copy(input.cu_seqlens.begin(), input.cu_seqlens.end(), many.begin() + 20);
  expect_message([&] { encoder.encode(few_ids, bounds, over(few_ids, 2), {}, true, runtime); },
                 {"[encode] embeddings shares memory with token_ids, which is read while it is written"});
  expect_message([&] { encoder.encode(few_ids, bounds, out, over(bounds, 7), true, runtime); },
                 {"[encode] hidden_states shares memory with cu_seqlens, which is read while it is written"});
  expect_message([&] { encoder.encode(ids, offsets, over(states, 2), states, true, runtime); },
                 {"[encode] embeddings and hidden_states share memory: outputs must be apart"});
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
