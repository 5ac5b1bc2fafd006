#include "model/encoder_weights.h"

#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/dtypes.h"
#include "heddle/safetensors.h"
#include "model/in_quotes.h"

namespace heddle {
namespace {

using nlohmann::json;

// Bounds that keep every product of two sizes far below 2^63.
constexpr std::int64_t kMaxSize = std::int64_t{1} << 24;
constexpr std::int64_t kMaxHeadSize = 256;

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw RuntimeError(text("[encoder] cannot open ", path, ": ", std::strerror(errno)));
  std::string content(std::istreambuf_iterator<char>(file), {});
  if (file.bad()) throw RuntimeError(text("[encoder] cannot read ", path));
  return content;
}

class ConfigFile {
 public:
  explicit ConfigFile(const std::string& path)
      : path_(path), root_(json::parse(read_text(path), nullptr, /*allow_exceptions=*/false)) {
    check_.require(root_.is_object(), path_, " is not a JSON object");
  }

  EncoderConfig read() const {
    require_value("model_type", "bert");
    require_value("hidden_act", "gelu");
    if (root_.contains("position_embedding_type")) require_value("position_embedding_type", "absolute");
    EncoderConfig config;
    config.hidden = size("hidden_size");
    config.layers = size("num_hidden_layers");
    config.heads = size("num_attention_heads");
    config.intermediate = size("intermediate_size");
    config.vocabulary = size("vocab_size");
    config.positions = size("max_position_embeddings");
    config.token_types = size("type_vocab_size");
    check_.require(config.hidden % config.heads == 0, path_, ": hidden_size ", config.hidden,
                   " is not a multiple of num_attention_heads ", config.heads);
    check_.require(config.hidden / config.heads <= kMaxHeadSize, path_, ": heads of ", config.hidden / config.heads,
                   " elements: at most ", kMaxHeadSize, " are supported");
    if (root_.contains("layer_norm_eps")) {
      const json& epsilon = root_["layer_norm_eps"];
      check_.require(epsilon.is_number() && epsilon.get<double>() > 0.0 && epsilon.get<double>() < 1.0, path_,
                     ": layer_norm_eps must be a number above 0 and below 1");
      config.layer_norm_epsilon = epsilon.get<float>();
    }
    return config;
  }

 private:
  std::int64_t size(const char* key) const {
    check_.require(root_.contains(key), path_, " has no ", key);
    const json& value = root_[key];
    check_.require(value.is_number_unsigned() && value.get<std::uint64_t>() >= 1 &&
                       value.get<std::uint64_t>() <= static_cast<std::uint64_t>(kMaxSize),
                   path_, ": ", key, " must be an integer from 1 to ", kMaxSize);
    return value.get<std::int64_t>();
  }
  void require_value(const char* key, const char* expected) const {
    check_.require(root_.contains(key), path_, " has no ", key);
    const json& value = root_[key];
    check_.require(value.is_string() && value.get_ref<const std::string&>() == expected, path_, ": ", key, " must be '",
                   expected, "'",
                   value.is_string() ? text("; found ", in_quotes(value.get_ref<const std::string&>())) : "");
  }

  const Check check_{"encoder"};
  std::string path_;
  json root_;
};

// Reads tensors of the model file as f32, with their shapes and values checked.
class TensorReader {
 public:
  TensorReader(const std::string& path, DType dtype) : path_(path), file_(SafeTensors::open(path)) {
    // Task-specific checkpoints keep the encoder under "bert.".
    if (file_.contains("bert.embeddings.word_embeddings.weight")) prefix_ = "bert.";
    // Absolute values from here on are not finite once held in `dtype`.
    limit_ = dtype == DType::bf16 ? 0x7f7f8000u : 0x7f800000u;
  }

  // A tensor of `columns`, or of rows x columns if rows > 0, appended to `out`.
  void append(const std::string& name, std::int64_t rows, std::int64_t columns, std::vector<float>& out) const {
    const std::string full = prefix_ + name;
    check_.require(file_.contains(full), path_, ": tensor '", full, "' is missing");
    const TensorView view = file_.tensor(full);
    const TensorView expected =
        rows > 0 ? TensorView(nullptr, DType::f32, {rows, columns}) : TensorView(nullptr, DType::f32, {columns});
    check_.require(view.rank == expected.rank && view.shape == expected.shape, path_, ": tensor '", full,
                   "' has the shape ", view, ": the configuration needs ", expected);
    check_.require(view.dtype == DType::f32 || view.dtype == DType::f16 || view.dtype == DType::bf16, path_,
                   ": tensor '", full, "' is ", name_of(view.dtype), ": weights must be floating-point numbers");
    const std::int64_t count = view.elements();
    const std::size_t begin = out.size();
    out.resize(begin + count);
    float* to = out.data() + begin;
    if (view.dtype == DType::f32) {
      std::memcpy(to, view.data, sizeof(float) * count);
    } else {
      for (std::int64_t i = 0; i < count; ++i) to[i] = load_element(view.data, view.dtype, i);
    }
    check_finite(full, to, count);
  }

  std::vector<float> matrix(const std::string& name, std::int64_t rows, std::int64_t columns) const {
    std::vector<float> out;
    append(name, rows, columns, out);
    return out;
  }
  std::vector<float> vector(const std::string& name, std::int64_t columns) const { return matrix(name, 0, columns); }

  LayerNormWeights layer_norm(const std::string& name, const EncoderConfig& config) const {
    return {vector(name + ".weight", config.hidden), vector(name + ".bias", config.hidden), config.layer_norm_epsilon};
  }

 private:
  void check_finite(const std::string& name, const float* values, std::int64_t count) const {
    const auto size = [&](std::int64_t i) { return std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffffu; };
    std::uint32_t largest = 0;  // without a branch in the loop, so that it vectorises
    for (std::int64_t i = 0; i < count; ++i) largest = std::max(largest, size(i));
    if (largest < limit_) return;
    std::int64_t i = 0;
    while (size(i) < limit_) ++i;
    check_.require(false, path_, ": tensor '", name, "' holds ", values[i], " at element ", i,
                   ": weights must be finite in the encoder's dtype");
  }

  const Check check_{"encoder"};
  std::string path_, prefix_;
  SafeTensors file_;
  std::uint32_t limit_ = 0;
};

std::vector<std::byte> held_as(DType dtype, const std::vector<float>& values) {
  std::vector<std::byte> out(values.size() * size_of(dtype));
  if (dtype == DType::f32) {
    std::memcpy(out.data(), values.data(), out.size());
  } else {
    narrow(values.data(), static_cast<std::int64_t>(values.size()), reinterpret_cast<std::uint16_t*>(out.data()));
  }
  return out;
}

}  // namespace

std::unique_ptr<Encoder::Weights> Encoder::Weights::load(const std::string& folder, const EncoderOptions& options) {
  const Check check("encoder");
  check.require(options.dtype == DType::f32 || options.dtype == DType::bf16, "dtype is ", name_of(options.dtype),
                ": it must be float32 or bfloat16");
  check.require(options.method.empty() || options.method == "flash" || options.method == "baseline", "method is ",
                in_quotes(options.method), ": it must be 'flash', 'baseline' or empty");

  auto weights = std::make_unique<Weights>();
  weights->options = options;
  const EncoderConfig config = weights->config = ConfigFile(folder + "/config.json").read();
  const TensorReader reader(folder + "/model.safetensors", options.dtype);

  std::size_t bytes = 0;
  const auto embedding = [&](const char* name, std::int64_t rows) {
    auto held = held_as(options.dtype, reader.matrix(text("embeddings.", name, ".weight"), rows, config.hidden));
    bytes += held.size();
    return held;
  };
  const auto norm = [&](const std::string& name) {
    bytes += 2 * sizeof(float) * config.hidden;
    return reader.layer_norm(name, config);
  };
  const auto linear = [&](const std::string& name, std::int64_t out, std::int64_t in) {
    Linear layer(reader.matrix(name + ".weight", out, in).data(), reader.vector(name + ".bias", out).data(), out, in,
                 options.dtype, DType::f32);
    bytes += layer.weight_bytes();
    return layer;
  };
  const auto fused_qkv = [&](const std::string& prefix) {
    std::vector<float> matrix, bias;
    for (const char* part : {"query", "key", "value"}) {
      reader.append(prefix + part + ".weight", config.hidden, config.hidden, matrix);
      reader.append(prefix + part + ".bias", 0, config.hidden, bias);
    }
    Linear layer(matrix.data(), bias.data(), 3 * config.hidden, config.hidden, options.dtype, options.dtype);
    bytes += layer.weight_bytes();
    return layer;
  };

  weights->word = embedding("word_embeddings", config.vocabulary);
  weights->position = embedding("position_embeddings", config.positions);
  weights->token_type = embedding("token_type_embeddings", config.token_types);
  weights->embedding_norm = norm("embeddings.LayerNorm");
  for (std::int64_t i = 0; i < config.layers; ++i) {
    const std::string prefix = text("encoder.layer.", i, ".");
    weights->layers.push_back(
        {fused_qkv(prefix + "attention.self."), linear(prefix + "attention.output.dense", config.hidden, config.hidden),
         norm(prefix + "attention.output.LayerNorm"),
         linear(prefix + "intermediate.dense", config.intermediate, config.hidden),
         linear(prefix + "output.dense", config.hidden, config.intermediate), norm(prefix + "output.LayerNorm")});
  }
  weights->bytes = bytes;
  return weights;
}

}  // namespace heddle
