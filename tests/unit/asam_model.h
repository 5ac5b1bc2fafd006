// A small layer of adaptive sparse attention, and rows for it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "heddle/asam.h"
#include "kit/plain_asam.h"

namespace heddle::test {

// Three heads of 20 elements over a width of 36: nothing divides a vector or a step of rows.
inline AsamConfig asam_config() {
  AsamConfig config;
  config.dim = 36;
  config.num_heads = 3;
  config.dim_head = 20;
  config.window_size = 64;
  config.stride = 3;
  config.num_clusters = 3;
  config.gate_hidden_dim = 10;
  config.block_size = 16;
  config.num_random = 20;
  config.scales = {2, 3, 4};
  return config;
}

inline AsamState views_of(const kit::AsamTensors& tensors) {
  AsamState out;
  for (const auto& [name, tensor] : tensors) {
    const std::vector<std::int64_t>& s = tensor.shape;
    const void* data = tensor.values.data();
    out[name] = s.size() == 1   ? TensorView(data, DType::f32, {s[0]})
                : s.size() == 2 ? TensorView(data, DType::f32, {s[0], s[1]})
                                : TensorView(data, DType::f32, {s[0], s[1], s[2]});
  }
  return out;
}

// Random weights of a layer, by the names of the Python layer's state dict.
inline kit::AsamTensors asam_tensors(const AsamConfig& c, std::uint32_t seed = 5) {
  kit::AsamTensors out;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto add = [&](const std::string& name, std::vector<std::int64_t> shape, float mean, float deviation) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    kit::AsamTensor& tensor = out[name];
    tensor.shape = std::move(shape);
    for (std::int64_t i = 0; i < count; ++i) tensor.values.push_back(mean + deviation * normal(random));
  };
  const auto linear = [&](const std::string& name, std::int64_t rows, std::int64_t columns, float spread = 1,
                          bool bias = true) {
    add(name + ".weight", {rows, columns}, 0, spread / std::sqrt(static_cast<float>(columns)));
    if (bias) add(name + ".bias", {rows}, 0, 0.2f);
  };
  const auto norm = [&](const std::string& name, std::int64_t size) {
    add(name + ".weight", {size}, 1, 0.2f);
    add(name + ".bias", {size}, 0, 0.2f);
  };
  const std::int64_t inner = c.num_heads * c.dim_head, hidden = c.gate_hidden_dim;
  std::string attention;
  if (c.use_adaptive_gate) {
    attention = "adaptive_attn.";
    linear("to_qkv", 3 * inner, c.dim, 1, false);  // not read
    linear("to_out.0", c.dim, inner);
    const std::string gate = attention + "gate.";
    linear(gate + "feature_proj.0", hidden, c.dim + c.dim / 2 + c.dim / 4 + c.dim / 8);
    norm(gate + "feature_proj.1", hidden);
    for (const char* network : {"complexity_estimator", "confidence_predictor", "pattern_selector"}) {
      linear(gate + network + ".0", hidden / 2, hidden);
      linear(gate + network + ".2", std::string(network) == "pattern_selector" ? 4 : c.num_heads, hidden / 2, 3);
    }
    add(gate + "sparse_threshold", {c.num_heads}, 0, 0.4f);
    add(gate + "gate_temp", {1}, -0.2f, 0);  // its magnitude counts
  }
  linear(attention + "to_qkv", 3 * inner, c.dim, 2, false);
  linear(attention + "to_out.0", c.dim, inner);
  linear("ffn.0", 4 * c.dim, c.dim);
  linear("ffn.3", c.dim, 4 * c.dim);
  norm("norm", c.dim);
  norm("ffn_norm", c.dim);
  const bool adaptive = c.pattern_type == AsamPattern::adaptive;
  if (adaptive || c.pattern_type == AsamPattern::clustered) {
    add("selection.centroids", {c.num_heads, c.num_clusters, c.dim_head}, 0, 1);
    add("selection.temperature", {1}, 0.5f, 0);
  }
  if (c.pattern_type == AsamPattern::hierarchical) {
    add("selection.scale_weights", {static_cast<std::int64_t>(c.scales.size()), c.num_heads}, 0, 1);
  }
  if (adaptive) add("selection.head_bias", {c.num_heads, 4}, 0, 1.5f);
  return out;
}

inline kit::AsamInput asam_input(const AsamConfig& config, std::int64_t batch, std::int64_t length,
                                 std::vector<std::int32_t> lengths = {}) {
  kit::AsamInput out{batch, length, config.dim, {}, std::move(lengths)};
  std::mt19937 random(23);
  std::normal_distribution<float> normal;
  out.x.resize(static_cast<std::size_t>(batch * length * config.dim));
  for (float& value : out.x) value = 0.2f + normal(random);
  return out;
}

}  // namespace heddle::test
