// A call on the CPU: rows through qkv, attention over all of them, rows through the rest, 64 at a time on one thread,
// so that they stay in its cache from layer to layer.
#include <algorithm>
#include <cstring>

#include "core/runtime.h"
#include "cpu/kernels.h"
#include "cpu/row_ops.h"
#include "model/transformer_block_call.h"

namespace heddle {

TransformerBlock::CpuCall::CpuCall(const Weights& weights, std::int64_t total, const Runtime& runtime)
    : weights_(weights),
      options_(weights.options),
      attention_(weights.attention()),
      element_(size_of(options_.dtype)),
      qkv_columns_(attention_.columns()),
      total_(total),
      executor_(executor_of(runtime)) {}

std::size_t TransformerBlock::CpuCall::attention_bytes(std::int64_t rows, const TensorView& cu_seqlens) const {
  Runtime runtime;
  runtime.executor = &executor_;
  return attention_.workspace(rows, cu_seqlens, 0, runtime);
}

TransformerBlock::CpuCall::Arrangement TransformerBlock::CpuCall::arrange(std::size_t attention_bytes) const {
  const std::int64_t hidden = options_.hidden;
  Arrangement plan{{{.total = total_, .hidden = hidden, .qkv = qkv_columns_, .element = element_}, attention_bytes}};
  CpuPlaces of_worker;
  std::size_t linear = 0;
  for (const TransformerLinear* layer : {&weights_.qkv, &weights_.out, &weights_.up, &weights_.down}) {
    linear = std::max(linear, layer->scratch_bytes());
  }
  const auto wide = static_cast<std::size_t>(weights_.up.fused() ? 0 : weights_.up.shape().out);
  plan.wide = of_worker.take(sizeof(float) * kLinearRows * wide);
  plan.activated = of_worker.take(element_ * kLinearRows * static_cast<std::size_t>(options_.intermediate));
  plan.sums = of_worker.take(sizeof(float) * kLinearRows * static_cast<std::size_t>(hidden));
  plan.linear = of_worker.take(linear);
  plan.deal_out(of_worker.bytes(), executor_.workers());
  return plan;
}

void TransformerBlock::CpuCall::run(const TensorView& x, const TensorView& cu_seqlens, const TensorView& y,
                                    std::size_t attention_bytes, std::byte* workspace) {
  plan_ = arrange(attention_bytes);
  workspace_ = workspace;
  over_rows(executor_, total_, [&](std::int64_t first, std::int64_t rows, int worker) {
    std::byte* stream = row(plan_.x, first, options_.hidden);
    for (std::int64_t i = 0; i < rows; ++i) {
      std::memcpy(stream + row_bytes() * static_cast<std::size_t>(i), outside(x, first + i), row_bytes());
    }
    weights_.qkv.run(stream, nullptr, row(plan_.qkv, first, qkv_columns_), qkv_columns_, rows,
                     worker_at(worker) + plan_.linear);
  });
  attend(cu_seqlens);
  over_rows(executor_, total_, [&](std::int64_t first, std::int64_t rows, int worker) {
    std::byte* stream = row(plan_.x, first, options_.hidden);
    add(weights_.out, weights_.norm1, row(plan_.context, first, options_.hidden), stream, rows, worker);
    add(weights_.down, weights_.norm2, feed_forward(stream, rows, worker), stream, rows, worker);
    for (std::int64_t i = 0; i < rows; ++i) {
      std::memcpy(outside(y, first + i), stream + row_bytes() * static_cast<std::size_t>(i), row_bytes());
    }
  });
}

void TransformerBlock::CpuCall::attend(const TensorView& cu_seqlens) const {
  Runtime runtime;
  runtime.executor = &executor_;
  runtime.workspace = {workspace_ + plan_.attention, plan_.attention_bytes};
  attention_.run(total_, cu_seqlens, 0, workspace_ + plan_.qkv, workspace_ + plan_.context, runtime);
}

const std::byte* TransformerBlock::CpuCall::feed_forward(const std::byte* x, std::int64_t rows, int worker) const {
  std::byte* scratch = worker_at(worker);
  std::byte* activated = scratch + plan_.activated;
  const TransformerLinear& up = weights_.up;
  if (up.fused()) {
    up.run(x, nullptr, activated, options_.intermediate, rows, scratch + plan_.linear);
    return activated;
  }
  up.run(x, nullptr, scratch + plan_.wide, up.shape().out, rows, scratch + plan_.linear);
  const auto* wide = reinterpret_cast<const float*>(scratch + plan_.wide);
  for (std::int64_t i = 0; i < rows; ++i) {
    cpu::kernels().linear.activate_row(options_.activation, wide + i * up.shape().out, up.shape().out,
                                       activated + element_ * static_cast<std::size_t>(i * options_.intermediate),
                                       options_.dtype);
  }
  return activated;
}

// The stream becomes stream + input W^T + b, and its norm where that is behind.
void TransformerBlock::CpuCall::add(const TransformerLinear& layer, const HeldNorm& norm, const std::byte* input,
                                    std::byte* stream, std::int64_t rows, int worker) const {
  std::byte* scratch = worker_at(worker);
  auto* sums = reinterpret_cast<float*>(scratch + plan_.sums);
  const std::int64_t hidden = options_.hidden;
  layer.run(input, stream, scratch + plan_.sums, hidden, rows, scratch + plan_.linear);
  if (!layer.fused()) accumulate(stream, rows * hidden, options_.dtype, sums);
  for (std::int64_t i = 0; i < rows; ++i) {
    const float* from = sums + i * hidden;
    std::byte* to = stream + row_bytes() * static_cast<std::size_t>(i);
    if (norm.kind != Norm::none) {
      cpu::kernels().linear.norm_row(norm.parameters(), reinterpret_cast<const std::byte*>(from), DType::f32, hidden,
                                     to, options_.dtype);
    } else {
      cpu::kernels().store_row(from, hidden, to, options_.dtype, 1);
    }
  }
}

}  // namespace heddle
