// What one SIMD target offers. Each targets/<name>.cc fills one table from the same source.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cpu/adaptive_plan.h"
#include "cpu/linear_kernels.h"
#include "cpu/lowbit_kernels.h"
#include "cpu/plan.h"
#include "cpu/row_ops.h"
#include "problem/adaptive.h"
#include "problem/attention.h"
#include "problem/partial.h"
#include "problem/pool.h"
#include "problem/select_blocks.h"
#include "problem/sparse.h"

namespace heddle::cpu {

struct Kernels {
  const char* name;
  int group;                   // query rows of one register tile
  bool bf16_pairs;             // products of bf16 operands in bf16, two at a time, summed in f32
  int bf16_rows;               // rows of a matrix that such a product takes at a time
  double f32_rate, bf16_rate;  // FLOP/s of one core in the matrix products, for estimates

  // Widens `count` elements, `stride` apart, to f32 with zeros up to `padded`; and the reverse, rounding.
  void (*load_row)(const std::byte* from, DType dtype, std::int64_t stride, std::int64_t count, std::int64_t padded,
                   float* to);
  void (*store_row)(const float* from, std::int64_t count, std::byte* to, DType dtype, std::int64_t stride);

  // Scratch bytes of one worker, and one task.
  std::size_t (*forward_scratch)(const AttentionProblem&, std::int64_t rows);  // tasks of at most `rows` query rows
  void (*forward)(const AttentionProblem&, const ForwardTask&, std::byte* scratch);
  // Keys of a tile of ForwardTask::tiles for sequence `s`; of BackwardTask::tiles it is kKeyBlock.
  std::int64_t (*key_tile)(const AttentionProblem&, const Sequence& s);
  // kv heads that one task for sequence `s` does best to take together; 1 unless it has few query rows.
  std::int64_t (*heads_together)(const AttentionProblem&, const Sequence& s);
  // f32 of one partial result, and the merge of `count` of them, one after the other, into o and lse.
  std::size_t (*partial_floats)(const AttentionProblem&);
  void (*merge)(const AttentionProblem&, const ForwardTask&, std::int64_t count, std::byte* scratch);

  std::size_t (*baseline_scratch)(const AttentionProblem&);
  void (*baseline_scores)(const AttentionProblem&, const BaselineTask&, std::byte* scratch);
  void (*baseline_softmax)(const AttentionProblem&, const BaselineTask&, std::byte* scratch);
  void (*baseline_output)(const AttentionProblem&, const BaselineTask&, std::byte* scratch);

  // f32 of one key's row of dk or dv sums for head size `width`.
  std::int64_t (*gradient_width)(std::int64_t width);
  std::size_t (*backward_scratch)(const AttentionBackwardProblem&);
  void (*backward)(const AttentionBackwardProblem&, const BackwardTask&, std::byte* scratch);
  // Adds `count` sums that stand `stride` f32 apart, in order, and writes them times `factor` as rows of `to`.
  void (*write_gradient)(const AttentionBackwardProblem&, const Operand& to, std::int64_t width, float factor,
                         std::int64_t b, std::int64_t kv_head, float* sums, std::int64_t count, std::int64_t stride);
  std::size_t (*bias_scratch)(const AttentionBackwardProblem&);
  void (*bias_gradient)(const AttentionBackwardProblem&, const BiasTask&, std::byte* scratch);

  // Attention over lists: scratch bytes for tasks of at most so many positions, and one task.
  std::size_t (*sparse_scratch)(const SparseProblem&, std::int64_t positions);
  void (*sparse_forward)(const SparseProblem&, const SparseTask&, std::byte* scratch);
  // The same, backward: dq is written, dk and dv are added to, sums as BackwardTask has them.
  std::size_t (*sparse_backward_scratch)(const SparseBackwardProblem&, std::int64_t positions);
  void (*sparse_backward)(const SparseBackwardProblem&, const SparseTask&, float* dk, float* dv, std::byte* scratch);

  // Attention with a tolerance: what is to be known of blocks [begin, end) of a kv head's values, and one task; and the
  // scratch bytes of each, of tasks of at most `rows` query rows.
  std::size_t (*value_scratch)(const AttentionProblem&);
  void (*value_blocks)(const AttentionProblem&, std::int64_t b, std::int64_t kv_head, std::int64_t begin,
                       std::int64_t end, ValueBlock* values, float* means, std::byte* scratch);
  std::size_t (*adaptive_scratch)(const AdaptiveProblem&, std::int64_t rows);
  void (*adaptive_forward)(const AdaptiveProblem&, const AdaptiveTask&, std::byte* scratch);
  std::size_t (*adaptive_backward_scratch)(const AdaptiveBackwardProblem&);
  void (*adaptive_backward)(const AdaptiveBackwardProblem&, const BackwardTask&, std::byte* scratch);

  // Partial results of whole calls: rows [begin, end) of all batches', counted b * S + i; and dsink of head h.
  void (*merge_partials)(const MergeProblem&, std::int64_t begin, std::int64_t end);
  void (*merge_partials_backward)(const MergeBackwardProblem&, std::int64_t begin, std::int64_t end);
  void (*merge_sink_gradient)(const MergeBackwardProblem&, std::int64_t h);

  // Pooled rows [begin, end), counted b * N + c, and gradients of keys [begin, end), counted b * S + j.
  void (*pool_keys)(const PoolProblem&, std::int64_t begin, std::int64_t end);
  void (*pool_keys_backward)(const PoolBackwardProblem&, std::int64_t begin, std::int64_t end);
  // The choice of blocks: scratch bytes for tasks of at most so many positions, and one task.
  std::size_t (*select_scratch)(const SelectProblem&, std::int64_t positions);
  void (*select_blocks)(const SelectProblem&, const SparseTask&, std::byte* scratch);

  RowKernels model_rows;
  LowbitKernels lowbit;
  LinearFunctions linear;
};

// The target in use; targets built into the library that this processor can run, best first.
const Kernels& kernels();
const std::vector<const Kernels*>& available_kernels();

}  // namespace heddle::cpu
