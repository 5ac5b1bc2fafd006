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
      context_columns_(attention_.heads * attention_.head),
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

void TransformerBlock::CpuCall::begin(std::size_t attention_bytes, std::byte* workspace) {
  plan_ = arrange(attention_bytes);
  workspace_ = workspace;
}

void TransformerBlock::CpuCall::run(const TensorView& x, const TensorView& cu_seqlens, const TensorView& y,
                                    std::size_t attention_bytes, std::byte* workspace) {
  begin(attention_bytes, workspace);
  over_rows(executor_, total_, [&](std::int64_t first, std::int64_t rows, int worker) {
    read(x, first, first, rows);
    project(first, rows, worker);
  });
  attend(cu_seqlens);
  over_rows(executor_, total_, [&](std::int64_t first, std::int64_t rows, int worker) {
    std::byte* own = stream(first);
    add(weights_.out, weights_.norm1, context(first), own, rows, worker);
    add(weights_.down, weights_.norm2, feed_forward(own, rows, worker), own, rows, worker);
    write(y, first, first, rows);
  });
}

void TransformerBlock::CpuCall::read(const TensorView& x, std::int64_t first) const { read(x, 0, first, x.shape[0]); }

void TransformerBlock::CpuCall::write(const TensorView& y, std::int64_t first) const { write(y, 0, first, y.shape[0]); }

void TransformerBlock::CpuCall::attention_part(const TensorView& cu_seqlens, float* part) const {
  over_rows(executor_, total_,
            [&](std::int64_t first, std::int64_t rows, int worker) { project(first, rows, worker); });
  attend(cu_seqlens);
  over_rows(executor_, total_, [&](std::int64_t first, std::int64_t rows, int worker) {
    weights_.out.run(context(first), nullptr, reinterpret_cast<std::byte*>(part + first * options_.hidden),
                     options_.hidden, rows, worker_at(worker) + plan_.linear);
  });
}

void TransformerBlock::CpuCall::feed_forward_part(float* part) const {
  over_rows(executor_, total_, [&](std::int64_t first, std::int64_t rows, int worker) {
    weights_.down.run(feed_forward(stream(first), rows, worker), nullptr,
                      reinterpret_cast<std::byte*>(part + first * options_.hidden), options_.hidden, rows,
                      worker_at(worker) + plan_.linear);
  });
}

void TransformerBlock::CpuCall::settle(float* sums, const WeightMemory& bias, const HeldNorm& norm, std::int64_t first,
                                       std::int64_t rows) const {
  over_rows(executor_, rows, [&](std::int64_t begin, std::int64_t count, int) {
    float* own = sums + begin * options_.hidden;
    for (std::int64_t i = 0; i < count && bias.size() > 0; ++i) {
      accumulate(bias.data(), options_.hidden, DType::f32, own + i * options_.hidden);
    }
    accumulate(stream(first + begin), count * options_.hidden, options_.dtype, own);
    store(norm, own, stream(first + begin), count);
  });
}

void TransformerBlock::CpuCall::read(const TensorView& x, std::int64_t from, std::int64_t first,
                                     std::int64_t rows) const {
  for (std::int64_t i = 0; i < rows; ++i) std::memcpy(stream(first + i), outside(x, from + i), row_bytes());
}

void TransformerBlock::CpuCall::write(const TensorView& y, std::int64_t to, std::int64_t first,
                                      std::int64_t rows) const {
  for (std::int64_t i = 0; i < rows; ++i) std::memcpy(outside(y, to + i), stream(first + i), row_bytes());
}

void TransformerBlock::CpuCall::project(std::int64_t first, std::int64_t rows, int worker) const {
  weights_.qkv.run(stream(first), nullptr, row(plan_.qkv, first, qkv_columns_), qkv_columns_, rows,
                   worker_at(worker) + plan_.linear);
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
  store(norm, sums, stream, rows);
}

// Sums are rows of the stream, or their norm is.
void TransformerBlock::CpuCall::store(const HeldNorm& norm, const float* sums, std::byte* stream,
                                      std::int64_t rows) const {
  const std::int64_t hidden = options_.hidden;
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
