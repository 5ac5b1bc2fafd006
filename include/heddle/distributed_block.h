// Transformer blocks over several processes, forward, on the CPU (docs/distributed.md): weights split over ranks
// (tensor parallelism), and stages of a model through which parts of a batch go one after the other (pipeline
// parallelism). Both are heddle/transformer_block.h's blocks over heddle/distributed.h's ranks. Shoeybi et al., arXiv
// 1909.08053; rows dealt out between layers (sequence parallelism): Korthikanti et al., arXiv 2205.05198;
// micro-batches: Huang et al., arXiv 1811.06965.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "heddle/distributed.h"
#include "heddle/transformer_block.h"

namespace heddle::distributed {

// [begin, end).
struct Range {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};
// `count` things dealt out to ranks in ranges, the first ranks' longer by one where they must be.
Range even_range(std::int64_t count, int ranks, int rank);

// A rank's share of a block: some key/value heads with the query heads that attend with them, and some of the columns
// between up and down, in units that the format of down stores together. Each layer's weights are those of the whole
// block, to the bit, low-bit ones too: the whole is quantised, and a part of it kept. qkv and up are split by rows, out
// and down by columns, and their products summed over ranks.
class TensorParallelBlock {
 public:
  // options and weights: of the whole, the same on every rank; copied as TransformerBlock copies them. The communicator
  // outlives this. sequence_parallel: x and y are a rank's rows. Throws as TransformerBlock does, and Error for fewer
  // key/value heads, or units of columns, than ranks, for an `out` whose columns of a rank cut a group of its format,
  // and for a block on a GPU.
  TensorParallelBlock(const TransformerBlockOptions& options, const TransformerBlockWeights& weights,
                      Communicator& communicator, bool sequence_parallel = false);
  ~TensorParallelBlock();
  TensorParallelBlock(const TensorParallelBlock&) = delete;
  TensorParallelBlock& operator=(const TensorParallelBlock&) = delete;

  const TransformerBlockOptions& options() const;  // the whole's
  HeadShare heads() const;                         // this rank's heads
  Range columns() const;                           // of the intermediate ones
  // This rank's parts of qkv, out, up and down, and the bytes of all its weights.
  std::vector<EncoderLayerInfo> layers() const;
  std::size_t weight_bytes() const;

  // As TransformerBlock::forward, with x and y [total, hidden] on every rank and x the same on all; with
  // sequence_parallel they are [n, hidden], rows even_range(total, ranks, rank), total being cu_seqlens' last. y may be
  // x.
  //
  // After attention, and after the feed-forward network, parts of sums are summed in f32 in the order of ranks, each
  // rank for its rows, which gets biases, residuals and norms behind; then rows of the block's dtype are gathered where
  // all are needed. So y is the whole block's within rounding, with and without sequence_parallel the same bits, and
  // bits repeat for the same number of ranks whatever the number of threads. Of low-bit layers parts have the block's
  // dtype before they are summed.
  //
  // The memory for rows is owned, allocated by the first call that needs it and kept. The first call compares over all
  // ranks what the block is: where that differs every rank throws Error. Throws Error on a bad argument before anything
  // is sent, RuntimeError where a rank is lost or has another number of rows.
  void forward(const TensorView& x, const TensorView& cu_seqlens, const TensorView& y, const Runtime& runtime = {},
               std::int64_t longest = 0);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Some blocks of a model, the others being on the ranks before and behind: rank r's come before rank r + 1's.
class PipelineStage {
 public:
  // blocks: at least one, all on the CPU, of one hidden and dtype, which are those of the other ranks' too. The
  // communicator outlives this. Throws Error.
  PipelineStage(std::vector<TransformerBlock> blocks, Communicator& communicator);
  ~PipelineStage();
  PipelineStage(const PipelineStage&) = delete;
  PipelineStage& operator=(const PipelineStage&) = delete;

  // Sequences go through the blocks of all ranks in micro-batches: while this rank computes one, the next rank has the
  // one before. x: [total, hidden] on rank 0, else not given; y: on the last rank, else not given; as
  // TransformerBlock::forward has them. cu_seqlens is the same on all ranks. y has the bits of one process that runs
  // all blocks over all rows, as a row's do not depend on other sequences.
  //
  // micro_batches: how many at most, from 1 on. A sequence is never cut: a micro-batch ends with the sequence in which
  // its part of all rows ends, so that few sequences, or a long one, make fewer. Memory, and what is thrown, are as of
  // TensorParallelBlock::forward; what is compared are hidden, dtype and micro_batches.
  void forward(const TensorView& x, const TensorView& cu_seqlens, const TensorView& y, int micro_batches,
               const Runtime& runtime = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace heddle::distributed
