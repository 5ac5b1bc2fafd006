// What a Transformer block's result is held to.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "core/dtypes.h"
#include "kit/plain_block.h"
#include "unit/block_model.h"

namespace heddle::test {

// The textbook block, sequence after sequence.
template <class T>
std::vector<double> plain_block(const TransformerBlockOptions& options, const kit::BlockValues& values,
                                const BlockInput& input, T (*round)(T)) {
  const kit::PlainBlock<T> block(options, values, round);
  std::vector<double> out;
  for (std::size_t s = 0; s + 1 < input.cu_seqlens.size(); ++s) {
    const BlockInput one = input.alone(s);
    typename kit::PlainBlock<T>::Rows rows(static_cast<std::size_t>(one.total()));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i].assign(one.x.begin() + static_cast<std::ptrdiff_t>(i) * input.hidden,
                     one.x.begin() + static_cast<std::ptrdiff_t>(i + 1) * input.hidden);
    }
    for (const auto& row : block(rows)) out.insert(out.end(), row.begin(), row.end());
  }
  return out;
}

inline double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double error = a.size() == b.size() ? 0 : INFINITY;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double one = std::abs(a[i] - b[i]);
    if (!(one <= error)) error = one;  // NaN stays
  }
  return error;
}

// In double precision, on the weights as held; and twice the error of the plain computation with the same weights, in
// the block's dtype, or in bfloat16 where products of some layers are, and the rounding of the result. 1e-6 stands for
// any order of f32's sums.
struct BlockExpected {
  std::vector<double> values;
  double bound = 0;

  BlockExpected(const BlockModel& model, const BlockInput& input) {
    const TransformerBlockOptions& options = model.options;
    const kit::BlockValues held = model.held();
    values = plain_block<double>(options, held, input, [](double value) { return value; });
    bool in_bf16 = options.dtype == DType::bf16;
    for (const lowbit::LayerRule& rule : options.layers) in_bf16 = in_bf16 || rule.format == "bfloat16";
    float (*round)(float) = [](float value) { return value; };
    if (options.dtype == DType::f16) round = [](float value) { return f16_to_f32(f32_to_f16(value)); };
    if (in_bf16) round = [](float value) { return bf16_to_f32(f32_to_bf16(value)); };
    const double unit = options.dtype == DType::bf16 ? 0x1p-9 : options.dtype == DType::f16 ? 0x1p-12 : 0x1p-24;
    bound = 2 * largest_difference(values, plain_block<float>(options, held, input, round)) +
            unit * largest_difference(values, std::vector<double>(values.size())) + 1e-6;
  }
};

inline std::string text_of(const TransformerBlockOptions& o) {
  return std::string(o.norm_first ? "norm first, " : "norm last, ") + name_of(o.norm) + ", " + name_of(o.activation) +
         ", kv_heads " + std::to_string(o.kv_heads) + (o.causal == Causal::none ? "" : ", causal");
}

}  // namespace heddle::test
