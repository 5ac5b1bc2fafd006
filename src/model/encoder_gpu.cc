#include <algorithm>

#include "cuda/model.h"
#include "model/encoder_call.h"

namespace heddle {

std::size_t Encoder::GpuCall::scratch_bytes() const {
  if (total_ == 0) return 0;
  std::size_t bytes = attention_.gpu_workspace(total_, sequences_, longest_);
  const EncoderLayer* last = nullptr;
  for (const EncoderLayer& layer : weights_.layers) {
    if (last != nullptr && layer.same_formats(*last)) continue;
    last = &layer;
    bytes = std::max(bytes, layer.qkv.gpu_workspace(total_));
    for (const TransformerLinear* linear : {&layer.attention_output, &layer.intermediate, &layer.output}) {
      bytes = std::max(bytes, linear->gpu_workspace(total_));
    }
  }
  return bytes;
}

void Encoder::GpuCall::run(const EncoderTask& task, const Runtime& given) const {
  auto* const memory = static_cast<std::byte*>(given.workspace.data);
  std::byte *const x = memory + rows_.x, *const qkv = memory + rows_.qkv, *const context = memory + rows_.context;
  std::byte* const activated = memory + rows_.activated;
  Runtime runtime = given;
  runtime.workspace = {memory + rows_.scratch, rows_.scratch_bytes};
  runtime.validate = false;  // the host has looked at the lengths
  const std::int64_t hidden = config_.hidden, intermediate = config_.intermediate;
  const auto norm_of = [&](const LayerNormWeights& weights) {
    const LayerNormRows rows = weights.rows();
    return cuda::NormRows{.dtype = dtype_,
                          .rows = total_,
                          .columns = hidden,
                          .weight = rows.gamma,
                          .bias = rows.beta,
                          .epsilon = rows.epsilon,
                          .y = x,
                          .y_stride = hidden};
  };

  const auto* offsets = reinterpret_cast<const std::int32_t*>(memory + offsets_);
  cuda::copy_to_gpu(memory + offsets_, task.cu_seqlens.data,
                    (static_cast<std::size_t>(sequences_) + 1) * sizeof(std::int32_t), runtime.stream);
  if (total_ > 0) {
    cuda::copy_to_gpu(memory + ids_, task.token_ids.data, static_cast<std::size_t>(total_) * sizeof(std::int32_t),
                      runtime.stream);
    cuda::norm_embeddings({.ids = reinterpret_cast<const std::int32_t*>(memory + ids_),
                           .offsets = offsets,
                           .sequences = sequences_,
                           .word = weights_.word.data(),
                           .position = weights_.position.data(),
                           .token_type = weights_.token_type.data()},
                          norm_of(weights_.embedding_norm), runtime.stream);
    TensorView cu_seqlens(offsets, DType::i32, {sequences_ + 1});
    cu_seqlens.device = Device::cuda;
    for (const EncoderLayer& layer : weights_.layers) {
      // x = layer_norm(input W^T + b + x), the sum in x's place.
      const auto add_and_norm = [&](const TransformerLinear& linear, const LayerNormWeights& norm, std::byte* input) {
        linear.run_on_gpu({input, linear.shape().in}, {x, hidden}, {x, hidden}, total_, runtime);
        cuda::norm_rows(x, norm_of(norm), runtime.stream);
      };
      layer.qkv.run_on_gpu(x, qkv, total_, runtime);
      attention_.run(total_, cu_seqlens, longest_, qkv, context, runtime);
      add_and_norm(layer.attention_output, layer.attention_norm, context);
      layer.intermediate.run_on_gpu({x, hidden}, {}, {activated, intermediate}, total_, runtime);
      add_and_norm(layer.output, layer.output_norm, activated);
    }
    if (task.hidden_states.given()) {
      cuda::widen(x, dtype_, total_ * hidden, static_cast<float*>(task.hidden_states.data), runtime.stream);
    }
  }
  cuda::pool_rows({.dtype = dtype_,
                   .x = x,
                   .offsets = offsets,
                   .sequences = sequences_,
                   .columns = hidden,
                   .normalize = task.normalize,
                   .y = static_cast<float*>(task.embeddings.data)},
                  runtime.stream);
}

}  // namespace heddle
