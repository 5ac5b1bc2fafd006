// A Transformer block's call on a GPU; transformer_block.cc has the CPU's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "model/gpu_workspace.h"
#include "model/packed_attention.h"
#include "model/transformer_block_weights.h"

namespace heddle {

// Everything on the stream. total > 0.
class TransformerBlock::GpuCall {
 public:
  GpuCall(const Weights& weights, std::int64_t total, std::int64_t sequences, std::int64_t longest);

  std::size_t workspace() const { return places_.bytes(); }
  // Arguments are checked, and runtime.workspace is large enough.
  void run(const TensorView& x, const TensorView& cu_seqlens, const TensorView& y, const Runtime& runtime) const;

 private:
  std::size_t scratch_bytes(std::int64_t sequences) const;

  const Weights& weights_;
  const TransformerBlockOptions& options_;
  const PackedAttention attention_;
  const std::int64_t total_, longest_;
  GpuPlaces places_;
  const GpuRowPlaces rows_;
};

}  // namespace heddle
