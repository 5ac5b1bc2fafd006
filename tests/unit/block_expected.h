// What a Transformer block's result is held to.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "kit/plain_block.h"
#include "unit/block_model.h"
#include "unit/model_expected.h"

namespace heddle::test {

// Of the weights as held. The plain computation is in the block's dtype, or in bfloat16 where products of some layers
// are.
struct BlockExpected : ExpectedTensor {
  BlockExpected(const BlockModel& model, const BlockInput& input)
      : ExpectedTensor{"y", input.hidden, model.options.dtype} {
    const TransformerBlockOptions& options = model.options;
    const kit::BlockValues held = model.held();
    DType in = options.dtype;
    for (const lowbit::LayerRule& rule : options.layers) in = rule.format == "bfloat16" ? DType::bf16 : in;
    exact = rows_of(kit::PlainBlock<double>(options, held, {}), input);
    for (const kit::Order order : kit::kOrders) {
      plain.values.push_back(rows_of(kit::PlainBlock<float>(options, held, {in, order}), input));
    }
  }

 private:
  // Sequence after sequence.
  template <class T>
  static std::vector<double> rows_of(const kit::PlainBlock<T>& block, const BlockInput& input) {
    std::vector<double> out;
    for (std::size_t s = 0; s + 1 < input.cu_seqlens.size(); ++s) {
      const BlockInput one = input.alone(s);
      kit::ModelRows<T> rows(static_cast<std::size_t>(one.total()));
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const auto from = one.x.begin() + static_cast<std::ptrdiff_t>(i) * input.hidden;
        rows[i].assign(from, from + input.hidden);
      }
      append<T>(block(rows), out);
    }
    return out;
  }
};

inline std::string text_of(const TransformerBlockOptions& o) {
  return std::string(o.norm_first ? "norm first, " : "norm last, ") + name_of(o.norm) + ", " + name_of(o.activation) +
         ", kv_heads " + std::to_string(o.kv_heads) + (o.causal == Causal::none ? "" : ", causal");
}

}  // namespace heddle::test
