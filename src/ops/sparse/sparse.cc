// Attention over lists of key blocks: check, ask each candidate, choose, launch.
#include "ops/sparse/sparse.h"

#include <algorithm>
#include <array>
#include <span>
#include <string>

#include "ops/attention/arguments.h"
#include "ops/sparse/choice.h"
#include "ops/validate.h"

namespace heddle {
namespace {

constexpr std::int64_t kMostQueryRows = 1 << 20;

// Lists that a sequence's rows need, over all sequences: N of include/heddle/sparse.h.
std::int64_t lists_of(const AttentionProblem& p, std::int64_t query_rows) {
  if (!p.cu_seqlens_q) return (p.Sq + query_rows - 1) / query_rows;
  return query_rows == 1 ? p.q_rows : p.q_rows / query_rows + p.B;
}

void check_units(const Check& check, const AttentionProblem& p, const char* name, const TensorView& view,
                 std::int64_t units) {
  check.require(units == 1 || units == p.Hkv || units == p.H, name, " is ", view, ": it has lists for ", units,
                " heads and must have them for 1, for each of ", p.Hkv, " key/value heads or for each of ", p.H,
                " query heads");
}

// Short, so that it costs a call that is right no allocation.
std::string rows_of_list(const BlockLists& lists) {
  return lists.query_rows == 1 ? text("row") : text(lists.query_rows, " rows");
}

// Lists one behind the other.
KeyLists checked_csr(const Check& check, const AttentionProblem& p, const BlockLists& lists) {
  const TensorView &blocks = lists.blocks, &offsets = lists.offsets;
  const bool packed = static_cast<bool>(p.cu_seqlens_q);
  const int n = packed ? 0 : 1;  // the extent of head units
  check.require(!lists.counts.given(), "counts is given beside offsets, which say how long each list is");
  check.tensor(blocks, "blocks", DType::i32, p.device, 1);
  check.require(blocks.stride[0] == 1 || blocks.shape[0] <= 1, "blocks must be contiguous beside offsets");
  check.readable_indices(blocks, "blocks");
  check.tensor(offsets, "offsets", DType::i32, p.device, n + 2);
  const std::int64_t wanted = lists_of(p, lists.query_rows);
  check.require((packed || offsets.shape[0] == p.B) && offsets.shape[n + 1] == wanted + 1, "offsets is ", offsets,
                ": it must be ", packed ? text("[L, ") : text("[", p.B, ", L, "), wanted + 1,
                "], where each list begins, one for each ", rows_of_list(lists), " of q, and where the last one ends");
  check_units(check, p, "offsets", offsets, offsets.shape[n]);
  check.readable_indices(offsets, "offsets");
  const std::int64_t all = std::max<std::int64_t>(1, (packed ? 1 : p.B) * offsets.shape[n] * wanted);
  return {.blocks = static_cast<const std::int32_t*>(blocks.data),
          .offsets = static_cast<const std::int32_t*>(offsets.data),
          .count_stride_b = packed ? 0 : offsets.stride[0],
          .count_stride_n = offsets.stride[n + 1],
          .count_stride_l = offsets.shape[n] == 1 ? 0 : offsets.stride[n],
          .units = offsets.shape[n],
          .entries = blocks.shape[0],
          .typical = (blocks.shape[0] + all - 1) / all,
          .block_size = lists.block_size,
          .query_rows = lists.query_rows,
          .by_offsets = true};
}

// Adds masks to lists that were checked. Whatever they hold is a mask.
void add_masks(const Check& check, const AttentionProblem& p, const BlockLists& lists, KeyLists& out) {
  const TensorView &masks = lists.masks, &ids = lists.mask_ids, &blocks = lists.blocks;
  if (!masks.given() && !ids.given()) return;
  check.require(ids.given(), "masks is given and mask_ids is missing, which says whose they are");
  check.require(masks.given(), "mask_ids is given and masks is missing");
  check.tensor(masks, "masks", DType::i32, p.device, 3);
  check.require(masks.shape[1] == out.query_rows && masks.shape[2] == out.mask_words(), "masks is ", masks,
                ": it must be [M, ", out.query_rows, ", ", out.mask_words(), "], ", out.mask_words(),
                out.mask_words() == 1 ? " word" : " words", " of 32 keys for each row of a list");
  check.require(masks.contiguous(), "masks must be contiguous");
  check.readable_indices(masks, "masks");
  check.tensor(ids, "mask_ids", DType::i32, p.device, blocks.rank);
  for (int i = 0; i < blocks.rank; ++i) {
    check.require(ids.shape[i] == blocks.shape[i], "mask_ids is ", ids, ": it must be a number for each entry of ",
                  "blocks, ", blocks);
  }
  const int last = blocks.rank - 1;
  check.require(ids.shape[last] <= 1 || ids.stride[last] == 1,
                "mask_ids must have contiguous entries: the last stride is ", ids.stride[last]);
  check.readable_indices(ids, "mask_ids");
  out.masked = true;
  out.masks = static_cast<const std::int32_t*>(masks.data);
  out.mask_ids = static_cast<const std::int32_t*>(ids.data);
  out.mask_count = masks.shape[0];
  if (blocks.rank == 1) return;  // one list behind the other
  out.mask_stride_b = p.cu_seqlens_q ? 0 : ids.stride[0];
  out.mask_stride_n = ids.stride[last - 2];
  out.mask_stride_l = out.units == 1 ? 0 : ids.stride[last - 1];
}

KeyLists checked_entries(const Check& check, const AttentionProblem& p, const BlockLists& lists) {
  const TensorView &blocks = lists.blocks, &counts = lists.counts;
  check_block_size(check, lists.block_size);
  check.require(lists.query_rows >= 1 && lists.query_rows <= kMostQueryRows, "query_rows is ", lists.query_rows,
                ": it must be from 1 to ", kMostQueryRows);
  check.require(blocks.given(), "blocks is missing");
  if (lists.offsets.given()) return checked_csr(check, p, lists);
  const bool packed = static_cast<bool>(p.cu_seqlens_q);
  const int rank = packed ? 3 : 4, n = rank - 3;  // n: the extent of lists
  check.tensor(blocks, "blocks", DType::i32, p.device, rank);
  const std::int64_t wanted = lists_of(p, lists.query_rows), units = blocks.shape[n + 1];
  check.require((packed || blocks.shape[0] == p.B) && blocks.shape[n] == wanted, "blocks is ", blocks, ": it must be ",
                packed ? text("[", wanted) : text("[", p.B, ", ", wanted), ", L, n], a list for each ",
                rows_of_list(lists), " of q");
  check_units(check, p, "blocks", blocks, units);
  const std::int64_t entries = blocks.shape[n + 2];
  check.require(entries <= 1 || blocks.stride[n + 2] == 1, "blocks must have contiguous entries: the last stride is ",
                blocks.stride[n + 2]);
  check.readable_indices(blocks, "blocks");
  KeyLists out{.blocks = static_cast<const std::int32_t*>(blocks.data),
               .stride_b = packed ? 0 : blocks.stride[0],
               .stride_n = blocks.stride[n],
               .stride_l = units == 1 ? 0 : blocks.stride[n + 1],
               .units = units,
               .entries = entries,
               .typical = entries,
               .block_size = lists.block_size,
               .query_rows = lists.query_rows};
  if (counts.given()) {
    check.tensor(counts, "counts", DType::i32, p.device, rank - 1);
    for (int i = 0; i < rank - 1; ++i) {
      check.require(counts.shape[i] == blocks.shape[i], "counts is ", counts, ": it must be a number for each list of ",
                    "blocks, ", blocks);
    }
    check.readable_indices(counts, "counts");
    out.counts = static_cast<const std::int32_t*>(counts.data);
    out.count_stride_b = packed ? 0 : counts.stride[0];
    out.count_stride_n = counts.stride[n];
    out.count_stride_l = units == 1 ? 0 : counts.stride[n + 1];
  }
  return out;
}

KeyLists checked_lists(const Check& check, const AttentionProblem& p, const BlockLists& lists) {
  KeyLists out = checked_entries(check, p, lists);
  add_masks(check, p, lists, out);
  return out;
}

// No output lies over the lists.
void check_apart_from(const Check& check, std::span<const Named> outputs, const BlockLists& lists) {
  const Named inputs[] = {{"blocks", &lists.blocks},
                          {"counts", &lists.counts},
                          {"offsets", &lists.offsets},
                          {"masks", &lists.masks},
                          {"mask_ids", &lists.mask_ids}};
  check_apart(check, outputs, inputs);
}

// What attention has and attention over lists has not.
void check_options(const Check& check, const AttentionProblem& p, const AttentionOptions& options) {
  check.require(!p.draft_mask, "draft_mask is given: attention over lists has none");
  check.require(p.key_step == 1, "key_step is ", p.key_step, ": it must be 1, as lists name blocks of single keys");
  check.require(p.precision == Precision::f32, "precision is not f32: attention over lists has no other");
  check.require(options.method.empty(), "method is '", options.method,
                "': attention over lists has one; leave it empty, or name a candidate as force");
}

}  // namespace

SparseProblem checked_sparse_problem(const Check& check, const TensorView& q, const TensorView& k, const TensorView& v,
                                     const BlockLists& lists, const TensorView& o, const TensorView& lse,
                                     const AttentionOptions& options, const OutputNames& outputs) {
  SparseProblem p;
  static_cast<AttentionProblem&>(p) = checked_forward_problem(check, q, k, v, o, lse, options, {}, outputs);
  check_options(check, p, options);
  p.lists = checked_lists(check, p, lists);
  const Named written[] = {{outputs.o, &o}, {outputs.lse, &lse}};
  check_apart_from(check, written, lists);
  return p;
}

SparseBackwardProblem checked_sparse_backward_problem(const Check& check, const TensorView& q, const TensorView& k,
                                                      const TensorView& v, const BlockLists& lists, const TensorView& o,
                                                      const TensorView& lse, const TensorView& d_o,
                                                      const TensorView& d_lse, const AttentionGradients& gradients,
                                                      const AttentionOptions& options) {
  SparseBackwardProblem p;
  static_cast<AttentionBackwardProblem&>(p) =
      checked_backward_problem(check, q, k, v, o, lse, d_o, d_lse, gradients, options);
  check_options(check, p, options);
  p.lists = checked_lists(check, p, lists);
  const Named outputs[] = {{"dq", &gradients.dq},
                           {"dk", &gradients.dk},
                           {"dv", &gradients.dv},
                           {"dbias", &gradients.dbias},
                           {"dsink", &gradients.dsink}};
  check_apart_from(check, outputs, lists);
  return p;
}

std::size_t sparse_attention_forward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                               const BlockLists& lists, const AttentionOptions& options,
                                               const Runtime& runtime) {
  const Check check("sparse_attention_forward", Data::to_come);
  const SparseProblem p = checked_sparse_problem(check, q, k, v, lists, {}, {}, options);
  const int workers = workers_of(runtime);
  return choose(check, p, wish_of<SparseProblem>(check, options.force), workers).workspace(p, workers);
}

void sparse_attention_forward(const TensorView& q, const TensorView& k, const TensorView& v, const BlockLists& lists,
                              const TensorView& o, const TensorView& lse, const AttentionOptions& options,
                              const Runtime& runtime) {
  sparse_attention_forward_with(q, k, v, lists, o, lse, options, runtime,
                                [&](std::size_t) { return runtime.workspace; });
}

void sparse_attention_forward_with(const TensorView& q, const TensorView& k, const TensorView& v,
                                   const BlockLists& lists, const TensorView& o, const TensorView& lse,
                                   const AttentionOptions& options, const Runtime& runtime,
                                   const std::function<Workspace(std::size_t bytes)>& scratch,
                                   const OutputNames& outputs) {
  const Check check("sparse_attention_forward");
  check.require(o.given(), "o is missing");
  const SparseProblem p = checked_sparse_problem(check, q, k, v, lists, o, lse, options, outputs);
  const int workers = workers_of(runtime);
  const SparseForwardKernel& kernel = choose(check, p, wish_of<SparseProblem>(check, options.force), workers);
  const std::size_t needed = kernel.workspace(p, workers);
  Runtime with = runtime;
  with.workspace = needed > 0 ? scratch(needed) : Workspace{};
  check_attention_indices("sparse_attention_forward", p, with);
  run(check, "sparse_attention_forward", kernel, p, with, needed);
}

std::vector<Candidate> explain_sparse_attention(const TensorView& q, const TensorView& k, const TensorView& v,
                                                const BlockLists& lists, const AttentionOptions& options,
                                                const Runtime& runtime) {
  const Check check("explain_sparse_attention", Data::to_come);
  return explained(checked_sparse_problem(check, q, k, v, lists, {}, {}, options),
                   wish_of<SparseProblem>(check, options.force), workers_of(runtime));
}

std::size_t sparse_attention_backward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                                const BlockLists& lists, const AttentionGradients& gradients,
                                                const AttentionOptions& options, const Runtime& runtime) {
  const Check check("sparse_attention_backward", Data::to_come);
  const SparseBackwardProblem p =
      checked_sparse_backward_problem(check, q, k, v, lists, {}, {}, {}, {}, gradients, options);
  const int workers = workers_of(runtime);
  return choose(check, p, wish_of<SparseBackwardProblem>(check, options.force), workers).workspace(p, workers);
}

void sparse_attention_backward(const TensorView& q, const TensorView& k, const TensorView& v, const BlockLists& lists,
                               const TensorView& o, const TensorView& lse, const TensorView& d_o,
                               const TensorView& d_lse, const AttentionGradients& gradients,
                               const AttentionOptions& options, const Runtime& runtime) {
  sparse_attention_backward_with(q, k, v, lists, o, lse, d_o, d_lse, gradients, options, runtime,
                                 [&](std::size_t) { return runtime.workspace; });
}

void sparse_attention_backward_with(const TensorView& q, const TensorView& k, const TensorView& v,
                                    const BlockLists& lists, const TensorView& o, const TensorView& lse,
                                    const TensorView& d_o, const TensorView& d_lse, const AttentionGradients& gradients,
                                    const AttentionOptions& options, const Runtime& runtime,
                                    const std::function<Workspace(std::size_t bytes)>& scratch) {
  const Check check("sparse_attention_backward");
  check.require(o.given(), "o is missing");
  check.require(lse.given(), "lse is missing: sparse_attention_forward writes it");
  check.require(d_o.given(), "d_o is missing");
  const SparseBackwardProblem p =
      checked_sparse_backward_problem(check, q, k, v, lists, o, lse, d_o, d_lse, gradients, options);
  const int workers = workers_of(runtime);
  const SparseBackwardKernel& kernel = choose(check, p, wish_of<SparseBackwardProblem>(check, options.force), workers);
  const std::size_t needed = kernel.workspace(p, workers);
  Runtime with = runtime;
  with.workspace = needed > 0 ? scratch(needed) : Workspace{};
  check_attention_indices("sparse_attention_backward", p, with);
  run(check, "sparse_attention_backward", kernel, p, with, needed);
}

std::vector<Candidate> explain_sparse_attention_backward(const TensorView& q, const TensorView& k, const TensorView& v,
                                                         const BlockLists& lists, const AttentionGradients& gradients,
                                                         const AttentionOptions& options, const Runtime& runtime) {
  const Check check("explain_sparse_attention_backward", Data::to_come);
  return explained(checked_sparse_backward_problem(check, q, k, v, lists, {}, {}, {}, {}, gradients, options),
                   wish_of<SparseBackwardProblem>(check, options.force), workers_of(runtime));
}

}  // namespace heddle
