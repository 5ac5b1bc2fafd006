// A small encoder whose layers have whole groups of every format, text for it, and what rules make of its weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "checkpoint/quantize_rules.h"
#include "core/dtypes.h"
#include "heddle/lowbit.h"
#include "heddle/transformer.h"
#include "unit/model_files.h"

namespace heddle::test {

inline constexpr EncoderConfig kConfig{.hidden = 128,
                                       .layers = 2,
                                       .heads = 4,
                                       .intermediate = 256,
                                       .vocabulary = 60,
                                       .positions = 70,
                                       .token_types = 2,
                                       .layer_norm_epsilon = 1e-6f};
// Sizes that no vector length, block or panel divides.
inline constexpr EncoderConfig kSmall{.hidden = 36,
                                      .layers = 2,
                                      .heads = 3,
                                      .intermediate = 150,
                                      .vocabulary = 50,
                                      .positions = 40,
                                      .token_types = 2,
                                      .layer_norm_epsilon = 1e-6f};
// Whole blocks of 64 rows, blocks with few rows, and none.
inline const std::vector<int> kLengths = {17, 1, 0, 66, 33, 5, 40};

struct Input {
  std::vector<std::int32_t> ids, cu_seqlens = {0};

  explicit Input(const std::vector<int>& lengths, std::int64_t vocabulary = kConfig.vocabulary,
                 std::uint32_t seed = 7) {
    std::mt19937 random(seed);
    for (const int length : lengths) {
      for (int i = 0; i < length; ++i) ids.push_back(static_cast<std::int32_t>(random() % vocabulary));
      cu_seqlens.push_back(static_cast<std::int32_t>(ids.size()));
    }
  }
  std::int64_t total() const { return static_cast<std::int64_t>(ids.size()); }
  std::int64_t sequences() const { return static_cast<std::int64_t>(cu_seqlens.size()) - 1; }
  std::int64_t longest() const {
    std::int64_t out = 0;
    for (std::int64_t i = 0; i < sequences(); ++i) {
      out = std::max<std::int64_t>(out, cu_seqlens[i + 1] - cu_seqlens[i]);
    }
    return out;
  }
  std::vector<std::int32_t> sequence(std::int64_t i) const {
    return {ids.begin() + cu_seqlens[i], ids.begin() + cu_seqlens[i + 1]};
  }
  TensorView id_view() const { return TensorView(ids.data(), DType::i32, {total()}); }
  TensorView offset_view() const { return TensorView(cu_seqlens.data(), DType::i32, {sequences() + 1}); }
};

// What a rule makes of a matrix, as float32 again.
inline std::vector<float> as_held(const std::vector<float>& weight, std::int64_t rows, std::int64_t columns,
                                  const std::string& format) {
  std::vector<float> out = weight;
  if (format == "float32") return out;
  if (format == "bfloat16") {
    for (float& value : out) value = bf16_to_f32(f32_to_bf16(value));
    return out;
  }
  if (format == "float16") {
    for (float& value : out) value = f16_to_f32(f32_to_f16(value));
    return out;
  }
  const std::size_t colon = format.find(':');
  lowbit::QuantizedMatrix matrix = lowbit::storage(lowbit::format_named(format.substr(0, colon)), rows, columns);
  std::vector<std::byte> memory[4];
  TensorView* parts[] = {&matrix.codes, &matrix.scales, &matrix.zeros, &matrix.global_scale};
  for (std::size_t i = 0; i < 4; ++i) {
    if (!parts[i]->given()) continue;
    memory[i].resize(static_cast<std::size_t>(parts[i]->elements()) * size_of(parts[i]->dtype));
    parts[i]->data = memory[i].data();
  }
  lowbit::QuantizeOptions options;
  if (colon != std::string::npos) options.rule = lowbit::rule_named(format.substr(colon + 1));
  quantize(TensorView(weight.data(), DType::f32, {rows, columns}), options, matrix);
  dequantize(matrix, TensorView(out.data(), DType::f32, {rows, columns}));
  return out;
}

inline bool is_linear(const std::string& name) {
  return name.ends_with(".weight") && name.starts_with("encoder.") && name.find("LayerNorm") == std::string::npos;
}

// The model whose linear layers hold what the rules make of them.
inline void hold(ModelFolder* folder, const std::vector<lowbit::LayerRule>& rules) {
  for (auto& [name, tensor] : folder->tensors) {
    if (!is_linear(name)) continue;
    const std::string layer = name.substr(0, name.size() - 7);
    for (const lowbit::LayerRule& rule : rules) {
      if (!lowbit::matches(rule.pattern, layer)) continue;
      tensor.values = as_held(tensor.values, tensor.shape[0], tensor.shape[1], rule.format);
      break;
    }
  }
}

}  // namespace heddle::test
