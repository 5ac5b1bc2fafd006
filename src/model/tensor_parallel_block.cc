// A block over ranks: the steps of a call on the CPU, and what ranks exchange between them.
#include <algorithm>
#include <bit>
#include <string>

#include "core/digest.h"
#include "core/runtime.h"
#include "distributed/agreement.h"
#include "distributed/memory.h"
#include "heddle/distributed_block.h"
#include "model/transformer_block_arguments.h"
#include "model/transformer_block_call.h"

namespace heddle::distributed {
namespace {

constexpr const char* kOperation = "tensor_parallel_block";

TransformerBlockOptions on_the_cpu(const TransformerBlockOptions& options, const Communicator& communicator) {
  const Check check(kOperation);
  check.require(options.device == Device::cpu, "device is cuda: blocks over several processes are on the CPU so far");
  check.require(communicator.device() == Device::cpu, "messages by ", communicator.name(),
                " lie on a GPU: blocks over several processes are on the CPU so far");
  return options;
}

}  // namespace

Range even_range(std::int64_t count, int ranks, int rank) {
  Check("distributed.even_range")
      .require(count >= 0 && rank >= 0 && rank < ranks, "count is ", count, ", ranks ", ranks, " and rank ", rank,
               ": it must be count >= 0 and 0 <= rank < ranks");
  const std::int64_t each = count / ranks, longer = count % ranks;
  const auto begin = [&](std::int64_t of) { return of * each + std::min(of, longer); };
  return {begin(rank), begin(rank + 1)};
}

struct TensorParallelBlock::State {
  State(const TransformerBlockOptions& options, const TransformerBlockWeights& weights, Communicator& of,
        bool sequence_parallel)
      : whole(on_the_cpu(options, of)),
        share(TransformerBlock::Weights::make(options, weights, RankOfBlock{of.rank(), of.size()})),
        sequence_parallel(sequence_parallel),
        communicator(of, kOperation),
        agreement(communicator) {
    if (whole.kv_heads == 0) whole.kv_heads = whole.heads;
  }

  std::vector<Agreement::Word> words() const {
    Digest formats;
    for (const EncoderLayerInfo& layer : share->layers()) formats.add_text(layer.format);
    return {{"hidden", whole.hidden},
            {"heads", whole.heads},
            {"kv_heads", whole.kv_heads},
            {"intermediate", whole.intermediate},
            {"dtype", static_cast<std::int64_t>(whole.dtype)},
            {"norm", static_cast<std::int64_t>(whole.norm)},
            {"norm_first", whole.norm_first},
            {"eps", std::bit_cast<std::int32_t>(whole.eps), Agreement::Shown::f32},
            {"activation", static_cast<std::int64_t>(whole.activation)},
            {"causal", static_cast<std::int64_t>(whole.causal)},
            {"formats", static_cast<std::int64_t>(formats.value()), Agreement::Shown::digest},
            {"sequence_parallel", sequence_parallel}};
  }

  Range rows_of(int rank, std::int64_t total) const { return even_range(total, communicator.size(), rank); }

  // Each rank's rows of the stream to all.
  void gather(const TransformerBlock::CpuCall& call, std::int64_t total, const std::string& what) {
    const std::size_t row_bytes = size_of(whole.dtype) * static_cast<std::size_t>(whole.hidden);
    std::vector<std::span<std::byte>> parts;
    for (int rank = 0; rank < communicator.size(); ++rank) {
      const Range rows = rows_of(rank, total);
      parts.push_back({call.stream(rows.begin), row_bytes * static_cast<std::size_t>(rows.size())});
    }
    communicator.all_gather(parts[static_cast<std::size_t>(communicator.rank())], parts, what);
  }

  // The sums over ranks of this rank's rows, until the next call. part: f32 [total, hidden].
  float* summed(std::span<const float> part, std::int64_t total, const std::string& what) {
    const auto hidden = static_cast<std::size_t>(whole.hidden);
    std::vector<std::span<const float>> parts;
    for (int rank = 0; rank < communicator.size(); ++rank) {
      const Range rows = rows_of(rank, total);
      parts.push_back(
          part.subspan(hidden * static_cast<std::size_t>(rows.begin), hidden * static_cast<std::size_t>(rows.size())));
    }
    const auto count = static_cast<std::int64_t>(parts[static_cast<std::size_t>(communicator.rank())].size());
    const std::span<float> sum = sums.get(count);
    communicator.reduce_scatter(parts, sum, scratch.get(count), what);
    return sum.data();
  }

  TransformerBlockOptions whole;
  const std::unique_ptr<const TransformerBlock::Weights> share;
  const bool sequence_parallel;
  Named communicator;
  Agreement agreement;
  WorkspaceBuffer workspace;
  Floats part, sums, scratch;
};

TensorParallelBlock::TensorParallelBlock(const TransformerBlockOptions& options, const TransformerBlockWeights& weights,
                                         Communicator& communicator, bool sequence_parallel)
    : state_(std::make_unique<State>(options, weights, communicator, sequence_parallel)) {}

TensorParallelBlock::~TensorParallelBlock() = default;

const TransformerBlockOptions& TensorParallelBlock::options() const { return state_->whole; }

HeadShare TensorParallelBlock::heads() const {
  const Range& kv = state_->share->kv_heads;
  const std::int64_t each = state_->whole.heads / state_->whole.kv_heads;
  return {kv.begin * each, kv.end * each, kv.begin, kv.end};
}

Range TensorParallelBlock::columns() const { return state_->share->columns; }

std::vector<EncoderLayerInfo> TensorParallelBlock::layers() const { return state_->share->layers(); }

std::size_t TensorParallelBlock::weight_bytes() const { return state_->share->bytes(); }

void TensorParallelBlock::forward(const TensorView& x, const TensorView& cu_seqlens, const TensorView& y,
                                  const Runtime& runtime, std::int64_t longest) {
  State& s = *state_;
  const Check check(kOperation);
  check_block_rows(check, s.whole, x, "x");
  check_block_rows(check, s.whole, y, "y");
  check_block_result(check, x, y);
  check_block_offsets(check, s.whole, cu_seqlens);
  check.require(longest >= 0, "longest is ", longest, ": it must not be negative");
  const std::int64_t last = static_cast<const std::int32_t*>(cu_seqlens.data)[cu_seqlens.shape[0] - 1];
  const std::int64_t total = s.sequence_parallel ? last : x.shape[0];
  require_block_offsets(check, block_offsets(cu_seqlens, total, longest));
  const Range own = s.rows_of(s.communicator.rank(), total);
  check.require(!s.sequence_parallel || x.shape[0] == own.size(), "x is ", x, ": rank ", s.communicator.rank(), " of ",
                s.communicator.size(), " has rows ", own.begin, " to ", own.end, " of ", total);
  s.agreement.require(s.words());
  if (total == 0) return;

  TransformerBlock::CpuCall call(*s.share, total, runtime);
  const std::size_t attention_bytes = call.attention_bytes(total, cu_seqlens);
  call.begin(attention_bytes, static_cast<std::byte*>(s.workspace.get(call.workspace(attention_bytes)).data));
  const std::span<float> part = s.part.get(whole_steps(total) * s.whole.hidden);

  call.read(x, s.sequence_parallel ? own.begin : 0);
  if (s.sequence_parallel) s.gather(call, total, "rows of x gathered");
  call.attention_part(cu_seqlens, part.data());
  call.settle(s.summed(part, total, "rows of out summed"), s.share->out_bias, s.share->norm1, own.begin, own.size());
  s.gather(call, total, "rows of attention gathered");
  call.feed_forward_part(part.data());
  call.settle(s.summed(part, total, "rows of down summed"), s.share->down_bias, s.share->norm2, own.begin, own.size());
  if (!s.sequence_parallel) s.gather(call, total, "rows of y gathered");
  call.write(y, s.sequence_parallel ? own.begin : 0);
}

}  // namespace heddle::distributed
