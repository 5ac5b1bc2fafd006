// A call and its arguments' checks; transformer_block_{cpu,gpu}.cc run it.
#include "heddle/transformer_block.h"

#include <vector>

#include "core/check.h"
#include "core/runtime.h"
#include "cuda/model.h"
#include "model/packed_lengths.h"
#include "model/transformer_block_arguments.h"
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

std::vector<EncoderLayerInfo> TransformerBlock::layers() const { return weights_->layers(); }

std::size_t TransformerBlock::weight_bytes() const { return weights_->bytes(); }

namespace {

void check_sizes(const Check& check, std::int64_t total, std::int64_t sequences, std::int64_t longest) {
  check.require(total >= 0 && total <= INT32_MAX, "total is ", total, ": it must be from 0 to 2^31 - 1");
  check.require(sequences >= 0 && sequences < INT32_MAX, "sequences is ", sequences, ": it must be from 0 to 2^31 - 2");
  check.require(longest >= 0 && longest <= INT32_MAX, "longest is ", longest, ": it must be from 0 to 2^31 - 1");
  check.require(total == 0 || longest > 0, "longest is 0: ", total, " rows need a longer sequence");
  check.require(total == 0 || (total - 1) / longest < sequences, sequences, " sequences of at most ", longest,
                " rows cannot hold ", total);
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
  check_block_rows(check, options, x, "x");
  check_block_rows(check, options, y, "y");
  check_block_result(check, x, y);
  check_block_offsets(check, options, cu_seqlens);
  const std::int64_t total = x.shape[0], sequences = cu_seqlens.shape[0] - 1;
  check.require(longest >= 0, "longest is ", longest, ": it must not be negative");
  const Offsets offsets = block_offsets(cu_seqlens, total, longest);
  if (gpu) {
    const int current = cuda::current_gpu("transformer_block");
    check.require(current == weights_->gpu, "GPU ", current, " is current and the block was made on GPU ",
                  weights_->gpu);
    check.require(total == 0 || longest > 0,
                  "longest is 0: cu_seqlens is on a GPU, where lengths are not read, so an upper bound must be given");
    check_sizes(check, total, sequences, longest);
  } else {
    require_block_offsets(check, offsets);
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
