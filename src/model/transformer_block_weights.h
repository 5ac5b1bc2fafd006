// A Transformer block's weights as held in memory.
#pragma once

#include <cstdint>
#include <memory>

#include "heddle/transformer_block.h"
#include "model/transformer_linear.h"
#include "model/weight_memory.h"

namespace heddle {

// A norm behind its layer.
struct HeldNorm {
  Norm kind = Norm::none;
  double eps = 0;
  WeightMemory weight, bias;  // f32 [hidden]; or empty

  cpu::NormParameters parameters() const {
    return {kind, eps, reinterpret_cast<const float*>(weight.data()), reinterpret_cast<const float*>(bias.data())};
  }
};

struct TransformerBlock::Weights {
  TransformerBlockOptions options;
  TransformerLinear qkv, out, up, down;  // qkv and up with norms in front if norm_first
  HeldNorm norm1, norm2;                 // else these

  static std::unique_ptr<const Weights> make(const TransformerBlockOptions& options,
                                             const TransformerBlockWeights& given);
  std::int64_t head() const { return options.hidden / options.heads; }
};

}  // namespace heddle
