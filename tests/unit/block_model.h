// A small Transformer block whose layers have whole groups of the formats that tests ask for, and rows for it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/dtypes.h"
#include "heddle/transformer_block.h"
#include "kit/host_tensor.h"
#include "kit/plain_block.h"
#include "unit/encoder_model.h"

namespace heddle::test {

inline TransformerBlockOptions block_options() {
  TransformerBlockOptions options;
  options.hidden = 64;
  options.heads = 4;
  options.kv_heads = 2;
  options.intermediate = 128;
  options.eps = 1e-6f;
  return options;
}

// Weights of a block in f32, and the views of them.
struct BlockModel {
  TransformerBlockOptions options;
  kit::BlockValues values;

  explicit BlockModel(const TransformerBlockOptions& given, bool biases = true) : options(given) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& to, std::int64_t count, float mean, float deviation) {
      to.resize(static_cast<std::size_t>(count));
      for (float& value : to) value = mean + deviation * normal(random);
    };
    const std::int64_t h = options.hidden, qkv = rows(0), up = rows(2), wide = options.intermediate;
    const auto spread = [](std::int64_t columns) { return 1.0f / std::sqrt(static_cast<float>(columns)); };
    fill(values.qkv, qkv * h, 0, spread(h));
    fill(values.out, h * h, 0, spread(h));
    fill(values.up, up * h, 0, spread(h));
    fill(values.down, h * wide, 0, spread(wide));
    fill(values.norm1, h, 1, 0.2f);
    fill(values.norm2, h, 1, 0.2f);
    if (!biases) return;
    fill(values.qkv_bias, qkv, 0, 0.3f);
    fill(values.out_bias, h, 0, 0.3f);
    fill(values.up_bias, up, 0, 0.3f);
    fill(values.down_bias, h, 0, 0.3f);
    if (options.norm != Norm::layer_norm) return;
    fill(values.norm1_bias, h, 0, 0.3f);
    fill(values.norm2_bias, h, 0, 0.3f);
  }

  // Of qkv, out, up and down.
  std::int64_t rows(int layer) const {
    if (layer == 0) return (options.heads + 2 * options.kv_heads) * (options.hidden / options.heads);
    return layer == 2 ? options.intermediate * (options.activation == Activation::swiglu ? 2 : 1) : options.hidden;
  }
  std::int64_t columns(int layer) const { return layer == 3 ? options.intermediate : options.hidden; }

  TransformerBlockWeights weights() const {
    const auto matrix = [&](const std::vector<float>& from, int layer) {
      return TensorView(from.data(), DType::f32, {rows(layer), columns(layer)});
    };
    const auto vector = [](const std::vector<float>& from) {
      return from.empty() ? TensorView()
                          : TensorView(from.data(), DType::f32, {static_cast<std::int64_t>(from.size())});
    };
    TransformerBlockWeights w;
    w.qkv = matrix(values.qkv, 0);
    w.out = matrix(values.out, 1);
    w.up = matrix(values.up, 2);
    w.down = matrix(values.down, 3);
    w.qkv_bias = vector(values.qkv_bias);
    w.out_bias = vector(values.out_bias);
    w.up_bias = vector(values.up_bias);
    w.down_bias = vector(values.down_bias);
    w.norm1 = vector(values.norm1);
    w.norm2 = vector(values.norm2);
    w.norm1_bias = vector(values.norm1_bias);
    w.norm2_bias = vector(values.norm2_bias);
    return w;
  }

  // The format of a layer, as the first rule that matches says.
  std::string format(const std::string& layer) const {
    for (const lowbit::LayerRule& rule : options.layers) {
      if (lowbit::matches(rule.pattern, layer)) return rule.format;
    }
    return name_of(options.dtype);
  }

  // What the block holds of them.
  kit::BlockValues held() const {
    kit::BlockValues out = values;
    const std::pair<const char*, std::vector<float>*> layers[] = {
        {"qkv", &out.qkv}, {"out", &out.out}, {"up", &out.up}, {"down", &out.down}};
    for (int i = 0; i < 4; ++i)
      *layers[i].second = as_held(*layers[i].second, rows(i), columns(i), format(layers[i].first));
    for (std::vector<float>* vector : {&out.qkv_bias, &out.out_bias, &out.up_bias, &out.down_bias, &out.norm1,
                                       &out.norm2, &out.norm1_bias, &out.norm2_bias}) {
      *vector = as_held(*vector, 1, static_cast<std::int64_t>(vector->size()), name_of(options.dtype));
    }
    return out;
  }
};

// Packed rows of x, as the block's dtype holds them, and what becomes of them.
struct BlockInput {
  DType dtype;
  std::int64_t hidden;
  std::vector<std::int32_t> cu_seqlens = {0};
  std::vector<float> x;

  BlockInput(const TransformerBlockOptions& options, const std::vector<int>& lengths)
      : dtype(options.dtype), hidden(options.hidden) {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    for (const int length : lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
    x.resize(static_cast<std::size_t>(total() * hidden));
    for (float& value : x) value = 0.2f + normal(random);
    x = as_held(x, total(), hidden, name_of(dtype));
  }
  std::int64_t total() const { return cu_seqlens.back(); }
  std::int64_t sequences() const { return static_cast<std::int64_t>(cu_seqlens.size()) - 1; }
  std::int64_t longest() const {
    std::int32_t out = 0;
    for (std::size_t i = 1; i < cu_seqlens.size(); ++i) out = std::max(out, cu_seqlens[i] - cu_seqlens[i - 1]);
    return out;
  }
  kit::HostTensor tensor() const {
    kit::HostTensor out = kit::HostTensor::input(dtype, {total(), hidden});
    for (std::size_t i = 0; i < x.size(); ++i) out.set(static_cast<std::int64_t>(i), x[i]);
    return out;
  }
  TensorView offsets() const { return TensorView(cu_seqlens.data(), DType::i32, {sequences() + 1}); }
  // Sequence i alone.
  BlockInput alone(std::size_t i) const {
    BlockInput out = *this;
    out.x.assign(x.begin() + cu_seqlens[i] * hidden, x.begin() + cu_seqlens[i + 1] * hidden);
    out.cu_seqlens = {0, cu_seqlens[i + 1] - cu_seqlens[i]};
    return out;
  }
};

}  // namespace heddle::test
