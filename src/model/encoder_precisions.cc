// Precisions of an encoder's layers, chosen by trying them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "core/check.h"
#include "heddle/transformer.h"
#include "model/encoder_weights.h"

namespace heddle {

// An encoder in float32 whose layers are exchanged one after another.
class EncoderTrials {
 public:
  EncoderTrials(const std::string& folder, const TensorView& token_ids, const TensorView& cu_seqlens,
                const Runtime& runtime)
      : token_ids_(token_ids), cu_seqlens_(cu_seqlens), runtime_(runtime), encoder_(Encoder::load(folder)) {
    layers_ = std::make_unique<EncoderLayers>(folder + "/model.safetensors", weights().config, EncoderOptions{});
    const auto* offsets = static_cast<const std::int32_t*>(cu_seqlens.data);
    sequences_ = cu_seqlens.shape[0] - 1;
    std::int64_t longest = 0;
    for (std::int64_t i = 0; i < sequences_; ++i) {
      longest = std::max<std::int64_t>(longest, std::int64_t{offsets[i + 1]} - offsets[i]);
    }
    longest_ = longest;
    exact_ = embeddings();
    for (const float value : exact_) norm_ += static_cast<double>(value) * value;
  }

  std::int64_t layer_count() const { return static_cast<std::int64_t>(weights().layers.size()); }
  // Of what is there now.
  double error() {
    const std::vector<float> found = embeddings();
    double sum = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
      const double d = static_cast<double>(found[i]) - exact_[i];
      sum += d * d;
    }
    return std::sqrt(sum / norm_);
  }
  std::size_t weight_bytes() const { return encoder_.weight_bytes(); }

  // The four products of a layer.
  enum Unit { projections, attention_output, intermediate, output };
  static constexpr int kUnits = 4;
  static std::string pattern(std::int64_t i, int unit) {
    const char* names[] = {"attention.self.*", EncoderLayers::kAttentionOutput, EncoderLayers::kIntermediate,
                           EncoderLayers::kOutput};
    return EncoderLayers::prefix(i) + names[unit];
  }
  // Puts a unit into a format; returns its bytes.
  std::size_t set(std::int64_t i, int unit, const std::string& format) {
    layers_->set_rules({{pattern(i, unit), format}});
    EncoderLayer& layer = weights().layers[static_cast<std::size_t>(i)];
    switch (unit) {
      case projections:
        layer.qkv = layers_->projections(i);
        return layer.qkv.weight_bytes();
      case attention_output:
        layer.attention_output = layers_->attention_output(i);
        return layer.attention_output.weight_bytes();
      case intermediate:
        layer.intermediate = layers_->intermediate(i);
        return layer.intermediate.weight_bytes();
      default:
        layer.output = layers_->output(i);
        return layer.output.weight_bytes();
    }
  }

 private:
  Encoder::Weights& weights() { return *encoder_.weights_; }
  const Encoder::Weights& weights() const { return *encoder_.weights_; }

  std::vector<float> embeddings() {
    const std::int64_t hidden = weights().config.hidden;
    std::vector<float> out(static_cast<std::size_t>(sequences_ * hidden));
    Runtime runtime = runtime_;
    runtime.workspace = scratch_.get(encoder_.workspace(token_ids_.shape[0], sequences_, longest_, runtime));
    encoder_.encode(token_ids_, cu_seqlens_, TensorView(out.data(), DType::f32, {sequences_, hidden}), {}, true,
                    runtime);
    return out;
  }

  TensorView token_ids_, cu_seqlens_;
  Runtime runtime_;
  Encoder encoder_;
  std::unique_ptr<EncoderLayers> layers_;
  std::int64_t sequences_ = 0, longest_ = 0;
  WorkspaceBuffer scratch_;
  std::vector<float> exact_;
  double norm_ = 0;
};

namespace {

// A format that a unit may have, and what it costs. The last one of a unit is float32, without error.
struct Option {
  std::string format;
  double bytes = 0, squared_error = 0;
};

// For each unit the candidate to take: from the smallest of each, the exchange that takes away the most squared error a
// byte, until what remains is allowed.
std::vector<std::size_t> smallest_within(const std::vector<std::vector<Option>>& units, double allowed) {
  std::vector<std::size_t> taken;
  double total = 0;
  for (const auto& candidates : units) {
    const auto least = std::min_element(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
      return std::pair(a.bytes, a.squared_error) < std::pair(b.bytes, b.squared_error);
    });
    taken.push_back(static_cast<std::size_t>(least - candidates.begin()));
    total += least->squared_error;
  }
  while (total > allowed) {
    std::size_t unit = units.size(), to = 0;
    double best = -1;
    for (std::size_t u = 0; u < units.size(); ++u) {
      const Option& now = units[u][taken[u]];
      for (std::size_t c = 0; c < units[u].size(); ++c) {
        const double gain = now.squared_error - units[u][c].squared_error;
        const double price = std::max(units[u][c].bytes - now.bytes, 1.0);
        if (gain <= 0 || gain / price <= best) continue;
        best = gain / price;
        unit = u;
        to = c;
      }
    }
    if (unit == units.size()) break;  // all are without error, and what remains is rounding
    total -= units[unit][taken[unit]].squared_error - units[unit][to].squared_error;
    taken[unit] = to;
  }
  return taken;
}

}  // namespace

PrecisionChoice choose_precisions(const std::string& folder, const TensorView& token_ids, const TensorView& cu_seqlens,
                                  const PrecisionOptions& options, const Runtime& runtime) {
  const Check check("choose_precisions");
  check.require(options.error >= 0 && std::isfinite(options.error), "error is ", options.error,
                ": it must be at least 0");
  for (const auto& [view, name] : {std::pair{&token_ids, "token_ids"}, {&cu_seqlens, "cu_seqlens"}}) {
    check.tensor(*view, name, DType::i32, Device::cpu, 1, "token_ids");
    check.require(view->contiguous(), name, " must be contiguous");
  }
  check.require(cu_seqlens.shape[0] >= 2 && token_ids.shape[0] >= 1, "the sample is empty");
  EncoderTrials trials(folder, token_ids, cu_seqlens, runtime);
  PrecisionChoice choice;
  std::vector<std::vector<Option>> units;
  std::vector<std::pair<std::int64_t, int>> places;
  for (std::int64_t i = 0; i < trials.layer_count(); ++i) {
    for (int unit = 0; unit < EncoderTrials::kUnits; ++unit) {
      std::vector<Option> candidates;
      for (const std::string& format : options.formats) {
        if (format == "float32") continue;
        const std::size_t bytes = trials.set(i, unit, format);
        const double error = trials.error();
        check.require(std::isfinite(error), "the embeddings are not finite with ", EncoderTrials::pattern(i, unit),
                      " in ", format);
        choice.trials.push_back({EncoderTrials::pattern(i, unit), format, bytes, error});
        candidates.push_back({format, static_cast<double>(bytes), error * error});
      }
      candidates.push_back({"float32", static_cast<double>(trials.set(i, unit, "float32")), 0});
      units.push_back(std::move(candidates));
      places.emplace_back(i, unit);
    }
  }
  // Errors of layers add up only about as squares, so what is measured decides, and what is allowed of the sum is
  // halved and doubled until the two are near. Float32 throughout is without error.
  const auto measure = [&](double allowed) {
    const std::vector<std::size_t> taken = smallest_within(units, allowed);
    std::vector<lowbit::LayerRule> layers;
    for (std::size_t u = 0; u < units.size(); ++u) {
      const auto& [i, unit] = places[u];
      const std::string& format = units[u][taken[u]].format;
      trials.set(i, unit, format);
      layers.push_back({EncoderTrials::pattern(i, unit), format});
    }
    const double error = trials.error();
    const bool holds = error <= options.error;
    if (holds && (choice.layers.empty() || trials.weight_bytes() < choice.weight_bytes)) {
      choice.layers = std::move(layers);
      choice.error = error;
      choice.weight_bytes = trials.weight_bytes();
    }
    return holds;
  };
  constexpr double kNothing = -1;
  double allowed = options.error * options.error, holding = 0, failing = 0;
  for (int round = 0; round < 8 && allowed > 0; ++round) {
    (measure(allowed) ? holding : failing) = allowed;
    if (holding > 0 && failing > 0) {
      if (failing / holding < 1.1) break;
      allowed = std::sqrt(holding * failing);
    } else {
      allowed *= holding > 0 ? 2 : 0.5;
    }
  }
  if (choice.layers.empty()) measure(kNothing);
  return choice;
}

}  // namespace heddle
