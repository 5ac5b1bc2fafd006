// A Transformer block's weights as held in memory.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "heddle/distributed_block.h"
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

// One of the ranks that share a block.
struct RankOfBlock {
  int rank = 0, ranks = 1;
};

struct TransformerBlock::Weights {
  TransformerBlockOptions options;       // of a share: its own heads, kv_heads and intermediate
  std::int64_t head = 0;                 // elements of one
  distributed::Range kv_heads, columns;  // of the whole's those that are here
  TransformerLinear qkv, out, up, down;  // qkv and up with norms in front if norm_first
  HeldNorm norm1, norm2;                 // else these
  WeightMemory out_bias, down_bias;      // f32 [hidden], of a share alone, whose layers have none; or empty
  int gpu = -1;                          // that all of them are on; -1: on the CPU

  // The whole block, or what one of several ranks has of it. Throws Error as TransformerBlock and TensorParallelBlock
  // do.
  static std::unique_ptr<const Weights> make(const TransformerBlockOptions& options,
                                             const TransformerBlockWeights& given,
                                             std::optional<RankOfBlock> shared = std::nullopt);
  std::vector<EncoderLayerInfo> layers() const;
  std::size_t bytes() const;
  PackedAttention attention() const {
    return {.dtype = options.dtype,
            .device = options.device,
            .heads = options.heads,
            .kv_heads = options.kv_heads,
            .head = head,
            .causal = options.causal,
            .method = ""};
  }
};

}  // namespace heddle
