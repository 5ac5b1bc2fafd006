#include "model/asam_weights.h"

#include <utility>

namespace heddle {
namespace {

// Keeps every product of two sizes far below 2^63.
constexpr std::int64_t kMaxSize = std::int64_t{1} << 24;

}  // namespace

void check_asam_config(const Check& check, const AsamConfig& config) {
  const auto within = [&](std::int64_t value, const char* name, std::int64_t least, std::int64_t most) {
    check.require(value >= least && value <= most, name, " is ", value, ": it must be from ", least, " to ", most);
  };
  within(config.dim, "dim", 1, kMaxSize);
  within(config.num_heads, "num_heads", 1, kMaxSize);
  within(config.dim_head, "dim_head", 1, kAsamHeadSize);
  check.require(config.num_heads * config.dim_head <= kMaxSize, "num_heads is ", config.num_heads, " and dim_head ",
                config.dim_head, ": their product must be at most ", kMaxSize);
  check.require(config.pattern_type <= AsamPattern::adaptive, "pattern_type is ", static_cast<int>(config.pattern_type),
                ": it must be local, strided, random, clustered, hierarchical or adaptive");
  check.require(config.gate <= AsamGate::soft, "gate is ", static_cast<int>(config.gate), ": it must be hard or soft");
  within(config.window_size, "window_size", 1, INT32_MAX);
  within(config.stride, "stride", 1, INT32_MAX);
  within(config.num_clusters, "num_clusters", 1, kMaxSize);
  within(config.gate_hidden_dim, "gate_hidden_dim", 2, kMaxSize);
  within(config.num_random, "num_random", 1, INT32_MAX);
  check.require(config.seed >= 0, "seed is ", config.seed, ": it must not be negative");
  check.require(
      config.block_size == 16 || config.block_size == 32 || config.block_size == 64 || config.block_size == 128,
      "block_size is ", config.block_size, ": it must be 16, 32, 64 or 128");
  check.require(!config.scales.empty() && config.scales.size() <= 4, "scales has ", config.scales.size(),
                " strides: it must have from 1 to 4");
  for (const std::int64_t scale : config.scales) within(scale, "an element of scales", 1, INT32_MAX);
  check.require(
      config.compat != "asam",
      "compat is 'asam': the public layer's own formulae are computed in Python alone, by heddle.compat.asam; "
      "leave it empty");
  check.require(config.compat.empty(), "compat is '", config.compat, "': it must be empty");
  check.require(
      config.pattern_type != AsamPattern::adaptive || config.use_adaptive_gate,
      "pattern_type is adaptive and use_adaptive_gate false: the gate's features choose the pattern, so without "
      "it pattern_type must be local, strided, random, clustered or hierarchical");
}

std::unique_ptr<const AsamLayer::Weights> AsamLayer::Weights::make(const Check& check, const AsamConfig& config,
                                                                   AsamStateReader& state, const std::string& prefix) {
  check_asam_config(check, config);
  const std::int64_t dim = config.dim, inner = config.num_heads * config.dim_head;
  const std::string attention = config.use_adaptive_gate ? prefix + "adaptive_attn." : prefix;
  HeldNorm norm = state.norm(prefix + "norm", dim), ffn_norm = state.norm(prefix + "ffn_norm", dim);
  FloatLinear qkv = state.linear(attention + "to_qkv", 3 * inner, dim, false);
  FloatLinear out = state.linear(attention + "to_out.0", dim, inner);
  FloatLinear up = state.linear(prefix + "ffn.0", 4 * dim, dim), down = state.linear(prefix + "ffn.3", dim, 4 * dim);
  std::optional<AsamGateWeights> gate;
  if (config.use_adaptive_gate) {
    gate = AsamGateWeights::make(state, config, attention + "gate.");
    // The layer's own, which are there for their names alone.
    for (const char* name : {"to_qkv.weight", "to_out.0.weight", "to_out.0.bias"}) state.leave(prefix + name);
  }
  AsamSelectionWeights selection = AsamSelectionWeights::make(state, config, prefix + "selection.");
  return std::unique_ptr<const Weights>(new Weights{config, std::move(norm), std::move(ffn_norm), std::move(qkv),
                                                    std::move(out), std::move(up), std::move(down), std::move(gate),
                                                    std::move(selection)});
}

std::size_t AsamLayer::Weights::bytes() const {
  std::size_t out_bytes = selection.bytes() + (gate ? gate->bytes() : 0);
  for (const HeldNorm* held : {&norm, &ffn_norm}) out_bytes += held->weight.size() + held->bias.size();
  for (const FloatLinear* layer : {&qkv, &out, &up, &down}) out_bytes += layer->weight_bytes();
  return out_bytes;
}

}  // namespace heddle
