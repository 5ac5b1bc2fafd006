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

  // Of a rank's share the steps between which ranks exchange (tensor_parallel_block.cc). The first says where all lies,
  // in so many bytes from `workspace` on.
  void begin(std::size_t attention_bytes, std::byte* workspace);
  // The residual stream, [total, hidden], from a row on.
  std::byte* stream(std::int64_t first) const { return row(plan_.x, first, options_.hidden); }
  // All rows of x to the stream, from its row `first` on, and from there to all rows of y.
  void read(const TensorView& x, std::int64_t first) const;
  void write(const TensorView& y, std::int64_t first) const;
  // What this rank adds to the sums of out, and of down: f32 [total, hidden], with room for whole_steps(total) rows.
  void attention_part(const TensorView& cu_seqlens, float* part) const;
  void feed_forward_part(float* part) const;
  // Rows of the stream become themselves + sums + bias, and their norm where that is behind. sums: f32 [rows, hidden];
  // it is overwritten. bias: f32 [hidden], or empty.
  void settle(float* sums, const WeightMemory& bias, const HeldNorm& norm, std::int64_t first, std::int64_t rows) const;

 private:
  // Of each worker:
  struct Arrangement : CpuRowPlaces {
    std::size_t wide = 0;       // f32 [kLinearRows, rows of up], where up is not low-bit
    std::size_t activated = 0;  // dtype [kLinearRows, intermediate]
    std::size_t sums = 0;       // f32 [kLinearRows, hidden]
    std::size_t linear = 0;     // scratch of a linear layer
  };
  Arrangement arrange(std::size_t attention_bytes) const;
  void read(const TensorView& x, std::int64_t from, std::int64_t first, std::int64_t rows) const;
  void write(const TensorView& y, std::int64_t to, std::int64_t first, std::int64_t rows) const;
  void project(std::int64_t first, std::int64_t rows, int worker) const;
  void attend(const TensorView& cu_seqlens) const;
  const std::byte* context(std::int64_t first) const { return row(plan_.context, first, context_columns_); }
  const std::byte* feed_forward(const std::byte* x, std::int64_t rows, int worker) const;
  void add(const TransformerLinear& layer, const HeldNorm& norm, const std::byte* input, std::byte* stream,
           std::int64_t rows, int worker) const;
  void store(const HeldNorm& norm, const float* sums, std::byte* stream, std::int64_t rows) const;

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
  const std::int64_t qkv_columns_, context_columns_, total_;
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
