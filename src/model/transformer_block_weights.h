// A Transformer block's weights as held in memory.
#pragma once

#include <cstdint>
#include <memory>

#include "heddle/transformer_block.h"
#include "model/packed_attention.h"
#include "model/transformer_linear.h"
#include "model/weight_memory.h"

namespace heddle {

// A norm behind its layer.
struct HeldNorm {
  Norm kind = Norm::none;
  double eps = 0;
  WeightMemory weight, bias;  // f32 [hidden]; or empty

  // In the memory that they are in.
  cpu::NormParameters parameters() const {
    return {kind, eps, reinterpret_cast<const float*>(weight.data()), reinterpret_cast<const float*>(bias.data())};
  }
};

struct TransformerBlock::Weights {
  TransformerBlockOptions options;
  TransformerLinear qkv, out, up, down;  // qkv and up with norms in front if norm_first
  HeldNorm norm1, norm2;                 // else these
  int gpu = -1;                          // that all of them are on; -1: on the CPU

  static std::unique_ptr<const Weights> make(const TransformerBlockOptions& options,
                                             const TransformerBlockWeights& given);
  PackedAttention attention() const {
    return {.dtype = options.dtype,
            .device = options.device,
            .heads = options.heads,
            .kv_heads = options.kv_heads,
            .head = options.hidden / options.heads,
            .causal = options.causal,
            .method = ""};
  }
};

}  // namespace heddle
