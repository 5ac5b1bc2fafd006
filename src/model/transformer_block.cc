// A call and its arguments' checks; transformer_block_{cpu,gpu}.cc run it.
#include "heddle/transformer_block.h"

#include <utility>
#include <vector>

#include "core/check.h"
#include "core/runtime.h"
#include "cuda/model.h"
#include "model/packed_lengths.h"
#include "model/transformer_block_call.h"
#include "ops/validate.h"

namespace heddle {
namespace {

constexpr const char* kWorkspaceAdvice = "TransformerBlock::workspace() says how many always suffice";

}  // namespace

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
  return call.workspace(
      most_attention_bytes(total, sequences, longest, executor_of(runtime).workers(), attention_bytes));
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
  const std::size_t attention_bytes = call.attention_bytes(total, cu_seqlens);
  check_workspace(check, runtime.workspace, call.workspace(attention_bytes), kWorkspaceAdvice);
  call.run(x, cu_seqlens, y, attention_bytes, static_cast<std::byte*>(runtime.workspace.data));
}

}  // namespace heddle
