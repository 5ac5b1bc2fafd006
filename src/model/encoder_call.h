// One encode() call, on the CPU (encoder.cc) and on a GPU (encoder_gpu.cc).
#pragma once

#include <cstddef>
#include <cstdint>

#include "model/encoder_weights.h"

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
        sequences_(sequences) {}

 protected:
  // q, k, v or the context as attention sees them: [total, heads, head size].
  TensorView heads(const std::byte* data, std::int64_t row_stride) const {
    const std::int64_t size = config_.hidden / config_.heads;
    TensorView view(data, dtype_, {total_, config_.heads, size}, {row_stride, size, 1});
    view.device = weights_.options.device;
    return view;
  }

  // Of packed rows of queries, keys and values.
  std::size_t attention_workspace(const std::byte* qkv, const AttentionOptions& options, const Runtime& runtime) const {
    const TensorView view = heads(qkv, 3 * config_.hidden);
    return attention_forward_workspace(view, view, view, options, runtime);
  }
  void attend(const std::byte* qkv, std::byte* context, const AttentionOptions& options, const Runtime& runtime) const {
    const std::size_t part = static_cast<std::size_t>(config_.hidden) * element_;
    attention_forward(heads(qkv, 3 * config_.hidden), heads(qkv + part, 3 * config_.hidden),
                      heads(qkv + 2 * part, 3 * config_.hidden), heads(context, config_.hidden), {}, options, runtime);
  }
  AttentionOptions attention_options(const TensorView& cu_seqlens, std::int64_t longest) const {
    AttentionOptions options;
    options.cu_seqlens_q = options.cu_seqlens_k = cu_seqlens;
    options.max_seqlen_q = options.max_seqlen_k = longest;
    options.method = weights_.options.method;
    options.batch_invariant = true;  // a text's embedding must not depend on its neighbours
    return options;
  }

  const Weights& weights_;
  const EncoderConfig& config_;
  const DType dtype_;
  const std::size_t element_;
  const std::int64_t total_, sequences_;
};

// Everything on the stream.
class Encoder::GpuCall : public Call {
 public:
  GpuCall(const Weights& weights, std::int64_t total, std::int64_t sequences, std::int64_t longest)
      : Call(weights, total, sequences), longest_(attended_longest(longest)), plan_(arrange()) {}

  std::size_t workspace() const { return plan_.bytes; }
  // runtime.workspace is large enough.
  void run(const EncoderTask& task, const Runtime& runtime) const;

 private:
  // Where everything lies in the workspace.
  struct Arrangement {
    std::size_t ids = 0, offsets = 0;  // int32 [total], [sequences + 1]
    std::size_t x = 0;                 // dtype [total, hidden]: the residual stream
    std::size_t qkv = 0, context = 0;  // dtype [total, 3 * hidden], [total, hidden]: attention's operands and output
    std::size_t activated = 0;         // dtype [total, intermediate], where those two were
    std::size_t scratch = 0, scratch_bytes = 0;  // of attention and linear layers
    std::size_t bytes = 0;
  };
  Arrangement arrange() const;
  std::size_t scratch_bytes() const;
  static std::int64_t attended_longest(std::int64_t longest);

  const std::int64_t longest_;  // as attention is told
  const Arrangement plan_;
};

}  // namespace heddle
