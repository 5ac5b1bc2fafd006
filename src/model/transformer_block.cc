// A call, its arguments' checks, and how the CPU runs it: rows through qkv, attention over all of them, rows through
// the rest, 64 at a time on one thread, so that they stay in its cache from layer to layer.
#include "heddle/transformer_block.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/parallel.h"
#include "core/runtime.h"
#include "cpu/kernels.h"
#include "cpu/row_ops.h"
#include "cuda/model.h"
#include "model/packed_lengths.h"
#include "model/places.h"
#include "model/transformer_block_call.h"
#include "ops/validate.h"

namespace heddle {
namespace {

constexpr const char* kWorkspaceAdvice = "TransformerBlock::workspace() says how many always suffice";

// Where everything lies in the workspace. `rows`: the total, up to whole steps of linear layers.
struct Arrangement {
  std::size_t x = 0;        // dtype [rows, hidden]: the residual stream
  std::size_t qkv = 0;      // dtype [rows, (heads + 2 kv_heads) * head]
  std::size_t context = 0;  // dtype [rows, hidden]: attention's output
  std::size_t attention = 0, attention_bytes = 0;
  std::size_t workers = 0, worker_bytes = 0;  // scratch of each worker, at:
  std::size_t wide = 0;                       //   f32 [kLinearRows, rows of up], where up is not low-bit
  std::size_t activated = 0;                  //   dtype [kLinearRows, intermediate]
  std::size_t sums = 0;                       //   f32 [kLinearRows, hidden]
  std::size_t linear = 0;                     //   scratch of a linear layer
  std::size_t bytes = 0;
};

}  // namespace

class TransformerBlock::CpuCall {
 public:
  CpuCall(const Weights& weights, std::int64_t total, const Runtime& runtime)
      : weights_(weights),
        options_(weights.options),
        attention_(weights.attention()),
        element_(size_of(options_.dtype)),
        qkv_columns_(attention_.columns()),
        total_(total),
        executor_(executor_of(runtime)) {}

  std::size_t attention_bytes(std::int64_t rows, const TensorView& cu_seqlens) const {
    Runtime runtime;
    runtime.executor = &executor_;
    return attention_.workspace(rows, cu_seqlens, 0, runtime);
  }

  Arrangement arrange(std::size_t attention_bytes) const {
    Arrangement plan;
    CpuPlaces places;
    const auto rows = static_cast<std::size_t>(whole_steps(total_));
    const auto hidden = static_cast<std::size_t>(options_.hidden);
    plan.x = places.take(rows * hidden * element_);
    plan.qkv = places.take(rows * static_cast<std::size_t>(qkv_columns_) * element_);
    plan.context = places.take(rows * hidden * element_);
    plan.attention = places.take(attention_bytes);
    plan.attention_bytes = attention_bytes;
    plan.workers = places.bytes();

    CpuPlaces of_worker;
    std::size_t linear = 0;
    for (const TransformerLinear* layer : {&weights_.qkv, &weights_.out, &weights_.up, &weights_.down}) {
      linear = std::max(linear, layer->scratch_bytes());
    }
    const auto wide = static_cast<std::size_t>(weights_.up.fused() ? 0 : weights_.up.shape().out);
    plan.wide = of_worker.take(sizeof(float) * kLinearRows * wide);
    plan.activated = of_worker.take(element_ * kLinearRows * static_cast<std::size_t>(options_.intermediate));
    plan.sums = of_worker.take(sizeof(float) * kLinearRows * hidden);
    plan.linear = of_worker.take(linear);
    plan.worker_bytes = of_worker.bytes();
    plan.bytes = plan.workers + plan.worker_bytes * static_cast<std::size_t>(executor_.workers());
    return plan;
  }

  void run(const TensorView& x, const TensorView& cu_seqlens, const TensorView& y, const Arrangement& plan,
           std::byte* workspace) {
    plan_ = plan;
    workspace_ = workspace;
    over_rows([&](std::int64_t first, std::int64_t rows, int worker) {
      std::byte* stream = row(plan_.x, first, options_.hidden);
      for (std::int64_t i = 0; i < rows; ++i) {
        std::memcpy(stream + row_bytes() * static_cast<std::size_t>(i), outside(x, first + i), row_bytes());
      }
      weights_.qkv.run(stream, nullptr, row(plan_.qkv, first, qkv_columns_), qkv_columns_, rows,
                       worker_at(worker) + plan_.linear);
    });
    attend(cu_seqlens);
    over_rows([&](std::int64_t first, std::int64_t rows, int worker) {
      std::byte* stream = row(plan_.x, first, options_.hidden);
      add(weights_.out, weights_.norm1, row(plan_.context, first, options_.hidden), stream, rows, worker);
      add(weights_.down, weights_.norm2, feed_forward(stream, rows, worker), stream, rows, worker);
      for (std::int64_t i = 0; i < rows; ++i) {
        std::memcpy(outside(y, first + i), stream + row_bytes() * static_cast<std::size_t>(i), row_bytes());
      }
    });
  }

 private:
  void attend(const TensorView& cu_seqlens) const {
    Runtime runtime;
    runtime.executor = &executor_;
    runtime.workspace = {workspace_ + plan_.attention, plan_.attention_bytes};
    attention_.run(total_, cu_seqlens, 0, workspace_ + plan_.qkv, workspace_ + plan_.context, runtime);
  }

  const std::byte* feed_forward(const std::byte* x, std::int64_t rows, int worker) const {
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
  void add(const TransformerLinear& layer, const HeldNorm& norm, const std::byte* input, std::byte* stream,
           std::int64_t rows, int worker) const {
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

  // Calls block(first row, rows, worker) over all rows. Few rows are split finer, to keep every worker busy.
  template <class Block>
  void over_rows(const Block& block) const {
    const std::int64_t step = total_ >= kLinearRows * executor_.workers() ? kLinearRows : kLinearRowStep;
    parallel_for(executor_, (total_ + step - 1) / step, [&](std::int64_t index, int worker) {
      block(index * step, std::min(step, total_ - index * step), worker);
    });
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

TransformerBlock::TransformerBlock(const TransformerBlockOptions& options, const TransformerBlockWeights& weights)
    : weights_(Weights::make(options, weights)) {}
TransformerBlock::TransformerBlock(TransformerBlock&&) noexcept = default;
TransformerBlock& TransformerBlock::operator=(TransformerBlock&&) noexcept = default;
TransformerBlock::~TransformerBlock() = default;

const TransformerBlockOptions& TransformerBlock::options() const { return weights_->options; }

std::vector<EncoderLayerInfo> TransformerBlock::layers() const {
  std::vector<EncoderLayerInfo> out;
  const Weights& w = *weights_;
  const std::pair<const char*, const TransformerLinear*> layers[] = {
      {"qkv", &w.qkv}, {"out", &w.out}, {"up", &w.up}, {"down", &w.down}};
  for (const auto& layer : layers) {
    const TransformerLinear& held = *layer.second;
    out.push_back(
        {layer.first, held.format(), held.shape().out, held.shape().in, held.weight_bytes(), held.packing_error()});
  }
  return out;
}

std::size_t TransformerBlock::weight_bytes() const {
  std::size_t bytes = 0;
  for (const EncoderLayerInfo& layer : layers()) bytes += layer.weight_bytes;
  for (const HeldNorm* norm : {&weights_->norm1, &weights_->norm2}) bytes += norm->weight.size() + norm->bias.size();
  return bytes;
}

namespace {

void check_sizes(const Check& check, std::int64_t total, std::int64_t sequences, std::int64_t longest) {
  check.require(total >= 0 && total <= INT32_MAX, "total is ", total, ": it must be from 0 to 2^31 - 1");
  check.require(sequences >= 0 && sequences < INT32_MAX, "sequences is ", sequences, ": it must be from 0 to 2^31 - 2");
  check.require(longest >= 0 && longest <= INT32_MAX, "longest is ", longest, ": it must be from 0 to 2^31 - 1");
  check.require(total == 0 || longest > 0, "longest is 0: ", total, " rows need a longer sequence");
  check.require(total == 0 || (total - 1) / longest < sequences, sequences, " sequences of at most ", longest,
                " rows cannot hold ", total);
}

Offsets offsets_of(const TensorView& cu_seqlens, std::int64_t total, std::int64_t longest) {
  return {static_cast<const std::int32_t*>(cu_seqlens.data),
          cu_seqlens.shape[0] - 1,
          total,
          longest,
          IndexName::cu_seqlens,
          IndexName::x,
          IndexName::longest};
}

}  // namespace

std::size_t TransformerBlock::workspace(std::int64_t total, std::int64_t sequences, std::int64_t longest,
                                        const Runtime& runtime) const {
  check_sizes(Check("transformer_block_workspace"), total, sequences, longest);
  if (total == 0) return 0;
  if (weights_->gpu >= 0) return GpuCall(*weights_, total, sequences, longest).workspace();
  const CpuCall call(*weights_, total, runtime);
  const auto attention_bytes = [&](const std::vector<std::int32_t>& cu_seqlens) {
    const auto entries = static_cast<std::int64_t>(cu_seqlens.size());
    return call.attention_bytes(cu_seqlens.back(), TensorView(cu_seqlens.data(), DType::i32, {entries}));
  };
  return call.arrange(most_attention_bytes(total, sequences, longest, executor_of(runtime).workers(), attention_bytes))
      .bytes;
}

void TransformerBlock::forward(const TensorView& x, const TensorView& cu_seqlens, const TensorView& y,
                               const Runtime& runtime, std::int64_t longest) const {
  const Check check("transformer_block");
  const TransformerBlockOptions& options = weights_->options;
  const bool gpu = options.device == Device::cuda;
  const auto on_device = [&](const TensorView& view, const char* name) {
    check.require(!view.given() || view.device == options.device, name, gpu ? " is on the CPU" : " is on a GPU",
                  ": this block was made to run on ", gpu ? "a GPU" : "the CPU");
  };
  const auto rows = [&](const TensorView& view, const char* name) {
    on_device(view, name);
    check.tensor(view, name, options.dtype, options.device, 2, "x");
    check.require(view.shape[1] == options.hidden, name, " is ", view, ": it must be [total, ", options.hidden,
                  "], the block's hidden");
    check.require(view.shape[1] == 1 || view.stride[1] == 1, name, "'s last dimension has stride ", view.stride[1],
                  ": it must be 1");
    check.addressable(view, name);
    if (!gpu) return;
    check.require(reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0, name, " must be aligned to 16 bytes");
    check.require(view.shape[0] <= 1 || (view.stride[0] >= options.hidden && view.stride[0] % 8 == 0), name,
                  "'s rows are ", view.stride[0], " elements apart: on a GPU it must be a multiple of 8, and at least ",
                  options.hidden);
  };
  rows(x, "x");
  rows(y, "y");
  check.require(x.shape == y.shape, "y is ", y, ": it must be ", x, ", as x");
  check.not_overlapping(y, "y");
  on_device(cu_seqlens, "cu_seqlens");
  check.tensor(cu_seqlens, "cu_seqlens", DType::i32, options.device, 1, "x");
  check.require(cu_seqlens.contiguous(), "cu_seqlens must be contiguous");
  const std::int64_t total = x.shape[0], sequences = cu_seqlens.shape[0] - 1;
  check.require(total <= INT32_MAX, "x has ", total, " rows: at most 2^31 - 1 can be packed");
  check.require(sequences >= 0, "cu_seqlens is empty: it holds one offset more than sequences");
  check.addressable(cu_seqlens, "cu_seqlens");
  check.require(longest >= 0, "longest is ", longest, ": it must not be negative");
  const Offsets offsets = offsets_of(cu_seqlens, total, longest);
  if (gpu) {
    const int current = cuda::current_gpu("transformer_block");
    check.require(current == weights_->gpu, "GPU ", current, " is current and the block was made on GPU ",
                  weights_->gpu);
    check.require(total == 0 || longest > 0,
                  "longest is 0: cu_seqlens is on a GPU, where lengths are not read, so an upper bound must be given");
    check_sizes(check, total, sequences, longest);
  } else {
    FirstBadIndex found;
    for (std::int64_t n = 0; n <= sequences; ++n) check_offset(offsets, n, CheckStep::q_offsets, found);
    require_none(check, found);
  }
  if (validates(runtime, options.device)) {
    cuda::check_indices("transformer_block", OffsetIndices{offsets}, runtime.stream);
  }
  if (total == 0) return;

  if (gpu) {
    const GpuCall call(*weights_, total, sequences, longest);
    check_workspace(check, runtime.workspace, call.workspace(), kWorkspaceAdvice);
    call.run(x, cu_seqlens, y, runtime);
    return;
  }
  CpuCall call(*weights_, total, runtime);
  const Arrangement plan = call.arrange(call.attention_bytes(total, cu_seqlens));
  check_workspace(check, runtime.workspace, plan.bytes, kWorkspaceAdvice);
  call.run(x, cu_seqlens, y, plan, static_cast<std::byte*>(runtime.workspace.data));
}

}  // namespace heddle
