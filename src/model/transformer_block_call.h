// A Transformer block's call, on the CPU and on a GPU. Arguments are checked; total > 0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "model/cpu_workspace.h"
#include "model/gpu_workspace.h"
#include "model/packed_attention.h"
#include "model/transformer_block_weights.h"

namespace heddle {

class TransformerBlock::CpuCall {
 public:
  CpuCall(const Weights& weights, std::int64_t total, const Runtime& runtime);

  // Of attention over so many rows.
  std::size_t attention_bytes(std::int64_t rows, const TensorView& cu_seqlens) const;
  // Of all, with so many for attention.
  std::size_t workspace(std::size_t attention_bytes) const { return arrange(attention_bytes).bytes; }
  void run(const TensorView& x, const TensorView& cu_seqlens, const TensorView& y, std::size_t attention_bytes,
           std::byte* workspace);

 private:
  // Of each worker:
  struct Arrangement : CpuRowPlaces {
    std::size_t wide = 0;       // f32 [kLinearRows, rows of up], where up is not low-bit
    std::size_t activated = 0;  // dtype [kLinearRows, intermediate]
    std::size_t sums = 0;       // f32 [kLinearRows, hidden]
    std::size_t linear = 0;     // scratch of a linear layer
  };
  Arrangement arrange(std::size_t attention_bytes) const;
  void attend(const TensorView& cu_seqlens) const;
  const std::byte* feed_forward(const std::byte* x, std::int64_t rows, int worker) const;
  void add(const TransformerLinear& layer, const HeldNorm& norm, const std::byte* input, std::byte* stream,
           std::int64_t rows, int worker) const;

  std::size_t row_bytes() const { return element_ * static_cast<std::size_t>(options_.hidden); }
  std::byte* worker_at(int worker) const {
    return workspace_ + plan_.workers + plan_.worker_bytes * static_cast<std::size_t>(worker);
  }
  std::byte* row(std::size_t buffer, std::int64_t index, std::int64_t columns) const {
    return workspace_ + buffer + static_cast<std::size_t>(index * columns) * element_;
  }
  // Row `index` of the caller's x or y.
  std::byte* outside(const TensorView& view, std::int64_t index) const {
    return static_cast<std::byte*>(view.data) + index * view.stride[0] * static_cast<std::int64_t>(element_);
  }

  const Weights& weights_;
  const TransformerBlockOptions& options_;
  const PackedAttention attention_;
  const std::size_t element_;
  const std::int64_t qkv_columns_, total_;
  Executor& executor_;
  std::byte* workspace_ = nullptr;
  Arrangement plan_;
};

// Everything on the stream.
class TransformerBlock::GpuCall {
 public:
  GpuCall(const Weights& weights, std::int64_t total, std::int64_t sequences, std::int64_t longest);

  std::size_t workspace() const { return places_.bytes(); }
  // runtime.workspace is large enough.
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
