#include <algorithm>

#include "cuda/encoder.h"
#include "model/encoder_call.h"

namespace heddle {
namespace {

// A longest sequence that attention is told of at least: kernels for decoding, whose workspace does not grow with it,
// are then never chosen for a call whose workspace was asked for with a larger bound. The others' workspace, but for
// the whole score matrix, which does grow, is at most kLeastScratch.
constexpr std::int64_t kLeastLongest = 64;
constexpr std::size_t kLeastScratch = 256;

std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// Any address that is aligned: queries read no data.
const std::byte* some_address() { return reinterpret_cast<const std::byte*>(std::uintptr_t{4096}); }

TensorView offsets_view(const std::byte* offsets, std::int64_t sequences) {
  TensorView view(offsets, DType::i32, {sequences + 1});
  view.device = Device::cuda;
  return view;
}

}  // namespace

Encoder::GpuCall::Arrangement Encoder::GpuCall::arrange() const {
  Arrangement plan;
  std::size_t at = 0;
  const auto place = [&at](std::size_t bytes) {
    const std::size_t place = at;
    at += aligned(bytes);
    return place;
  };
  const auto rows = static_cast<std::size_t>(total_);
  const std::size_t hidden = static_cast<std::size_t>(config_.hidden) * element_;
  plan.ids = place(rows * sizeof(std::int32_t));
  plan.offsets = place((static_cast<std::size_t>(sequences_) + 1) * sizeof(std::int32_t));
  plan.x = place(rows * hidden);
  plan.activated = plan.qkv = place(rows * 3 * hidden);
  plan.context = place(rows * hidden);
  at = std::max(at, plan.activated + aligned(rows * static_cast<std::size_t>(config_.intermediate) * element_));
  plan.scratch = at;
  plan.scratch_bytes = scratch_bytes();
  plan.bytes = plan.scratch + aligned(plan.scratch_bytes);
  return plan;
}

std::int64_t Encoder::GpuCall::attended_longest(std::int64_t longest) { return std::max(longest, kLeastLongest); }

std::size_t Encoder::GpuCall::scratch_bytes() const {
  if (total_ == 0) return 0;
  const std::byte* some = some_address();
  const AttentionOptions options = attention_options(offsets_view(some, sequences_), longest_);
  std::size_t bytes = std::max(attention_workspace(some, options, {}), kLeastScratch);
  const EncoderLayer* last = nullptr;
  for (const EncoderLayer& layer : weights_.layers) {
    if (last != nullptr && layer.same_formats(*last)) continue;
    last = &layer;
    bytes = std::max(bytes, layer.qkv.gpu_workspace(some, total_));
    for (const TransformerLinear* linear : {&layer.attention_output, &layer.intermediate, &layer.output}) {
      bytes = std::max(bytes, linear->gpu_workspace(some, total_));
    }
  }
  return bytes;
}

void Encoder::GpuCall::run(const EncoderTask& task, const Runtime& given) const {
  auto* const memory = static_cast<std::byte*>(given.workspace.data);
  std::byte *const x = memory + plan_.x, *const qkv = memory + plan_.qkv, *const context = memory + plan_.context;
  std::byte* const activated = memory + plan_.activated;
  Runtime runtime = given;
  runtime.workspace = {memory + plan_.scratch, plan_.scratch_bytes};
  const std::int64_t hidden = config_.hidden;
  const auto norm_of = [&](const LayerNormWeights& weights) {
    const LayerNormRows rows = weights.rows();
    return cuda::NormRows{.dtype = dtype_,
                          .rows = total_,
                          .columns = hidden,
                          .gamma = rows.gamma,
                          .beta = rows.beta,
                          .epsilon = rows.epsilon,
                          .y = x};
  };

  const auto* offsets = reinterpret_cast<const std::int32_t*>(memory + plan_.offsets);
  cuda::copy_to_gpu(memory + plan_.offsets, task.cu_seqlens.data,
                    (static_cast<std::size_t>(sequences_) + 1) * sizeof(std::int32_t), runtime.stream);
  if (total_ > 0) {
    cuda::copy_to_gpu(memory + plan_.ids, task.token_ids.data, static_cast<std::size_t>(total_) * sizeof(std::int32_t),
                      runtime.stream);
    cuda::norm_embeddings({.ids = reinterpret_cast<const std::int32_t*>(memory + plan_.ids),
                           .offsets = offsets,
                           .sequences = sequences_,
                           .word = weights_.word.data(),
                           .position = weights_.position.data(),
                           .token_type = weights_.token_type.data()},
                          norm_of(weights_.embedding_norm), runtime.stream);
    const AttentionOptions options = attention_options(offsets_view(memory + plan_.offsets, sequences_), longest_);
    for (const EncoderLayer& layer : weights_.layers) {
      // x = layer_norm(input W^T + b + x), the sum in x's place.
      const auto add_and_norm = [&](const TransformerLinear& linear, const LayerNormWeights& norm,
                                    const std::byte* input) {
        linear.run_on_gpu(input, x, x, hidden, total_, runtime);
        cuda::norm_rows(x, norm_of(norm), runtime.stream);
      };
      layer.qkv.run_on_gpu(x, qkv, total_, runtime);
      attend(qkv, context, options, runtime);
      add_and_norm(layer.attention_output, layer.attention_norm, context);
      layer.intermediate.run_on_gpu(x, nullptr, activated, config_.intermediate, total_, runtime);
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
