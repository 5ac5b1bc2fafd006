// One encode() call, on the CPU (encoder.cc) and on a GPU (encoder_gpu.cc).
#pragma once

#include <cstddef>
#include <cstdint>

#include "model/encoder_weights.h"
#include "model/gpu_workspace.h"
#include "model/packed_attention.h"

namespace heddle {

// What a call has to do, checked.
struct EncoderTask {
  TensorView token_ids, cu_seqlens, embeddings, hidden_states;
  std::int64_t longest = 0;
  bool normalize = false;
};

// What both have in common.
class Encoder::Call {
 public:
  Call(const Weights& weights, std::int64_t total, std::int64_t sequences)
      : weights_(weights),
        config_(weights.config),
        dtype_(weights.options.dtype),
        element_(size_of(dtype_)),
        total_(total),
        sequences_(sequences),
        attention_{.dtype = dtype_,
                   .device = weights.options.device,
                   .heads = config_.heads,
                   .kv_heads = config_.heads,
                   .head = config_.hidden / config_.heads,
                   .method = weights.options.method} {}

 protected:
  const Weights& weights_;
  const EncoderConfig& config_;
  const DType dtype_;
  const std::size_t element_;
  const std::int64_t total_, sequences_;
  const PackedAttention attention_;
};

// Everything on the stream.
class Encoder::GpuCall : public Call {
 public:
  GpuCall(const Weights& weights, std::int64_t total, std::int64_t sequences, std::int64_t longest)
      : Call(weights, total, sequences),
        longest_(longest),
        ids_(places_.take(static_cast<std::size_t>(total) * sizeof(std::int32_t))),
        offsets_(places_.take((static_cast<std::size_t>(sequences) + 1) * sizeof(std::int32_t))),
        rows_({.total = total,
               .hidden = config_.hidden,
               .qkv = attention_.columns(),
               .intermediate = config_.intermediate,
               .element = element_},
              scratch_bytes(), places_) {}

  std::size_t workspace() const { return places_.bytes(); }
  // runtime.workspace is large enough.
  void run(const EncoderTask& task, const Runtime& runtime) const;

 private:
  std::size_t scratch_bytes() const;

  const std::int64_t longest_;
  GpuPlaces places_;
  const std::size_t ids_, offsets_;  // int32 [total], [sequences + 1]
  const GpuRowPlaces rows_;
};

}  // namespace heddle
