#include "model/encoder_weights.h"

#include <bit>
#include <cstring>
#include <set>

#include "core/check.h"
#include "core/dtypes.h"
#include "core/in_quotes.h"
#include "core/json.h"
#include "cuda/model.h"
#include "heddle/safetensors.h"

namespace heddle {
namespace {

using nlohmann::json;

// Bounds that keep every product of two sizes far below 2^63.
constexpr std::int64_t kMaxSize = std::int64_t{1} << 24;
constexpr std::int64_t kMaxHeadSize = 256;

class ConfigFile {
 public:
  explicit ConfigFile(const std::string& path) : path_(path), root_(read_json("encoder", path, kMaxConfigBytes)) {
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

}  // namespace

// Tensors of the model file as f32, with their shapes and values checked, and its low-bit layers.
class EncoderLayers::File {
 public:
  File(const std::string& path, DType dtype) : path_(path), checkpoint_({SafeTensors::open(path)}) {
    for (const lowbit::StoredLayer& layer : checkpoint_.layers()) stored_.insert(layer.name);
    // Task-specific checkpoints keep the encoder under "bert.".
    if (file().contains("bert.embeddings.word_embeddings.weight")) prefix_ = "bert.";
    // Absolute values from here on are not finite once held in `dtype`.
    limit_ = dtype == DType::bf16 ? 0x7f7f8000u : dtype == DType::f16 ? 0x477ff000u : 0x7f800000u;
  }

  // A tensor of `columns`, or of rows x columns if rows > 0, appended to `out`.
  void append(const std::string& name, std::int64_t rows, std::int64_t columns, std::vector<float>& out) const {
    const std::string full = prefix_ + name;
    check_.require(file().contains(full), path_, ": tensor '", full, "' is missing");
    const TensorView view = file().tensor(full);
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

  bool stored_low_bit(const std::string& name) const { return stored_.contains(prefix_ + name); }
  const std::string& path() const { return path_; }
  // A layer that is stored so, of that shape.
  OwnedMatrix low_bit(const std::string& name, std::int64_t rows, std::int64_t columns) const {
    const lowbit::StoredLayer layer = checkpoint_.layer(prefix_ + name);
    check_.require(layer.rows == rows && layer.columns == columns && layer.experts == 0, path_, ": layer ",
                   in_quotes(prefix_ + name), " is [", layer.rows, ", ", layer.columns, "]: the configuration needs [",
                   rows, ", ", columns, "]");
    OwnedMatrix out(layer.format, rows, columns);
    checkpoint_.load(prefix_ + name, out.matrix);
    return out;
  }

  LayerNormWeights layer_norm(const std::string& name, const EncoderConfig& config, Device device) const {
    const auto held = [&](const char* part) {
      return WeightMemory(vector(name + part, config.hidden).data(), static_cast<std::size_t>(config.hidden),
                          DType::f32, device);
    };
    return {held(".weight"), held(".bias"), config.layer_norm_epsilon};
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

  const SafeTensors& file() const { return checkpoint_.files()[0]; }

  const Check check_{"encoder"};
  std::string path_, prefix_;
  lowbit::Checkpoint checkpoint_;
  std::set<std::string> stored_;
  std::uint32_t limit_ = 0;
};

EncoderLayers::EncoderLayers(const std::string& path, const EncoderConfig& config, const EncoderOptions& options)
    : config_(config),
      dtype_(options.dtype),
      device_(options.device),
      file_(std::make_unique<File>(path, options.dtype)) {
  set_rules(options.layers);
}
EncoderLayers::~EncoderLayers() = default;

std::string EncoderLayers::prefix(std::int64_t i) { return text("encoder.layer.", i, "."); }

void EncoderLayers::set_rules(std::vector<lowbit::LayerRule> rules) {
  formats_ = LayerFormats(Check("encoder"), std::move(rules), dtype_, device_);
}

void EncoderLayers::require_all_matched() const {
  formats_.require_all_matched(Check("encoder"),
                               "encoder.layer.0.attention.self.query, ...attention.output.dense, "
                               "...intermediate.dense, ...output.dense and the like");
}

TransformerLinear EncoderLayers::make(const std::string& name, std::int64_t out, std::int64_t in, LinearRole role) {
  const Check check("encoder");
  const TransformerLinear::Shape shape{
      .out = out,
      .in = in,
      .dtype = dtype_,
      .role = role,
      .activation = role == LinearRole::activate ? Activation::gelu_erf : Activation::none,
      .device = device_};
  const std::string wanted = formats_.of(name);
  const bool floating = LayerFormats::is_floating(wanted);
  const DType precision = LayerFormats::precision(wanted, dtype_);
  const std::vector<float> bias = file_->vector(name + ".bias", out);
  if (file_->stored_low_bit(name)) {
    const OwnedMatrix held = file_->low_bit(name, out, in);
    if (!floating) {
      const std::string format = lowbit::name_of(held.matrix.format);
      check.require(wanted.empty() || wanted == format, file_->path(), ": layer ", in_quotes(name), " is in ", format,
                    " and a rule asks for ", in_quotes(wanted), ": weights are not quantised twice");
      return TransformerLinear(shape, held.matrix, bias.data());
    }
    std::vector<float> weight(static_cast<std::size_t>(out * in));
    lowbit::dequantize(held.matrix, TensorView(weight.data(), DType::f32, {out, in}));
    return TransformerLinear(shape, weight.data(), bias.data(), precision);
  }
  const std::vector<float> weight = file_->matrix(name + ".weight", out, in);
  if (floating || wanted.empty()) return TransformerLinear(shape, weight.data(), bias.data(), precision);
  const std::string tensor = text(file_->path(), ": tensor ", in_quotes(name + ".weight"));
  const OwnedMatrix matrix = quantized(check, tensor, weight.data(), out, in, wanted);
  return TransformerLinear(shape, matrix.matrix, bias.data());
}

EncoderProjections EncoderLayers::projections(std::int64_t i) {
  const std::int64_t hidden = config_.hidden;
  bool together = true;
  for (const char* part : kProjections) {
    const std::string name = prefix(i) + part, wanted = formats_.of(name);
    together = together && (wanted.empty() || wanted == name_of(dtype_)) && !file_->stored_low_bit(name);
  }
  if (together) {
    std::vector<float> matrix, bias;
    for (const char* part : kProjections) {
      file_->append(prefix(i) + part + ".weight", hidden, hidden, matrix);
      file_->append(prefix(i) + part + ".bias", 0, hidden, bias);
    }
    if (device_ == Device::cuda) {
      const TransformerLinear::Shape shape{.out = 3 * hidden, .in = hidden, .dtype = dtype_, .device = device_};
      std::vector<TransformerLinear> whole;
      whole.emplace_back(shape, matrix.data(), bias.data(), dtype_);
      return EncoderProjections(std::move(whole));
    }
    return EncoderProjections(FloatLinear(matrix.data(), bias.data(), 3 * hidden, hidden, dtype_, dtype_), dtype_);
  }
  std::vector<TransformerLinear> parts;
  for (const char* part : kProjections) parts.push_back(make(prefix(i) + part, hidden, hidden, LinearRole::project));
  return EncoderProjections(std::move(parts));
}

TransformerLinear EncoderLayers::attention_output(std::int64_t i) {
  return make(prefix(i) + kAttentionOutput, config_.hidden, config_.hidden, LinearRole::sum);
}
TransformerLinear EncoderLayers::intermediate(std::int64_t i) {
  return make(prefix(i) + kIntermediate, config_.intermediate, config_.hidden, LinearRole::activate);
}
TransformerLinear EncoderLayers::output(std::int64_t i) {
  return make(prefix(i) + kOutput, config_.hidden, config_.intermediate, LinearRole::sum);
}

std::size_t Encoder::Weights::bytes() const {
  std::size_t total = other_bytes;
  for (const EncoderLayer& layer : layers) {
    total += layer.qkv.weight_bytes() + layer.attention_output.weight_bytes() + layer.intermediate.weight_bytes() +
             layer.output.weight_bytes();
  }
  return total;
}

std::unique_ptr<Encoder::Weights> Encoder::Weights::load(const std::string& folder, const EncoderOptions& options) {
  const Check check("encoder");
  const bool gpu = options.device == Device::cuda, bf16 = options.dtype == DType::bf16;
  check.require(bf16 || options.dtype == (gpu ? DType::f16 : DType::f32), "dtype is ", name_of(options.dtype),
                gpu ? ": on a GPU it must be float16 or bfloat16" : ": it must be float32 or bfloat16");
  check.require(options.method.empty() || options.method == "flash" || options.method == "baseline", "method is ",
                in_quotes(options.method), ": it must be 'flash', 'baseline' or empty");

  auto weights = std::make_unique<Weights>();
  weights->options = options;
  if (gpu) weights->gpu = cuda::current_gpu("encoder");
  const EncoderConfig config = weights->config = ConfigFile(folder + "/config.json").read();
  if (gpu) {
    for (const auto& [name, size] :
         {std::pair{"hidden_size", config.hidden}, {"intermediate_size", config.intermediate}}) {
      check.require(size % 8 == 0, folder, "/config.json: ", name, " is ", size,
                    ": on a GPU it must be a multiple of 8");
    }
  }
  EncoderLayers layers(folder + "/model.safetensors", weights->config, options);
  const EncoderLayers::File& reader = layers.file();

  const auto embedding = [&](const char* name, std::int64_t rows) {
    const std::vector<float> values = reader.matrix(text("embeddings.", name, ".weight"), rows, config.hidden);
    WeightMemory held(values.data(), values.size(), options.dtype, options.device);
    weights->other_bytes += held.size();
    return held;
  };
  const auto norm = [&](const std::string& name) {
    weights->other_bytes += 2 * sizeof(float) * static_cast<std::size_t>(config.hidden);
    return reader.layer_norm(name, config, options.device);
  };

  weights->word = embedding("word_embeddings", config.vocabulary);
  weights->position = embedding("position_embeddings", config.positions);
  weights->token_type = embedding("token_type_embeddings", config.token_types);
  weights->embedding_norm = norm("embeddings.LayerNorm");
  for (std::int64_t i = 0; i < config.layers; ++i) {
    const std::string prefix = EncoderLayers::prefix(i);
    weights->layers.push_back({layers.projections(i), layers.attention_output(i),
                               norm(prefix + "attention.output.LayerNorm"), layers.intermediate(i), layers.output(i),
                               norm(prefix + "output.LayerNorm")});
  }
  layers.require_all_matched();
  return weights;
}

}  // namespace heddle
