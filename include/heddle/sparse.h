// Attention over lists of key blocks: each row of queries meets the keys of the blocks that its list names and no
// other. One contract for every sparse method, whoever makes the lists (docs/sparse.md).
//
// Words: as in attention.h. Keys of a sequence are cut into blocks of `block_size`, block c of keys
// [c * block_size, (c + 1) * block_size) of the sequence; the last one may be shorter.
//
// Meaning: row i of query head h attends key j if causality and window let it, and its list holds j / block_size.
// A list is a set: entries come in any order, and one that is there twice counts once. Entries that name no block of
// the sequence (negative, as -1 where a list ends early, or too large), or none that the row may meet, say nothing.
// Where there are masks an entry may have one, and row i then attends only those keys of the block whose bits it sets:
// causality, window and mask must all let a pair. Of entries that name the same block the first one counts, with its
// mask.
// Everything else is as attention.h has it, over the keys that are left: a row without any gives o = 0 and
// lse = -inf (with a sink, lse = sink: it is in the denominator of every row).
// Yuan et al. (native sparse attention), arXiv 2502.11089; Lu et al. (MoBA), arXiv 2502.13189.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "heddle/attention.h"

namespace heddle {

// int32, on q's device. N lists of n entries for each of L head units in each sequence: N = ceil(Sq / query_rows).
//   batched   blocks [B, N, L, n]   counts [B, N, L]
//   packed    blocks [N, L, n]      counts [N, L]; the list of row i of sequence b is number
//             cu_seqlens_q[b] + i where query_rows is 1 (N = total_q), else
//             cu_seqlens_q[b] / query_rows + b + i / query_rows (N = total_q / query_rows + B; what lies between is
//             not read)
// L is 1 (one list for all heads), Hkv (one for a group), or H. Strides are free, but entries of a list are contiguous.
// Lists of many lengths are better one behind the other (CSR):
//   batched   blocks [entries]      offsets [B, L, N + 1]
//   packed    blocks [entries]      offsets [L, N + 1]
// List n of a head unit is entries offsets[.., n] to offsets[.., n + 1] - 1 of `blocks`, which is contiguous, as far as
// there are such entries: offsets are taken to lie from 0 to their number, and a list that ends before it begins is
// empty.
// Masks of single pairs are a pool that entries share:
//   masks     [M, query_rows, W]    W = ceil(block_size / 32) words, contiguous. Bit j % 32 of word j / 32 of row r is
//             key j of the block, for the list's r-th row; bits from block_size on are not read
//   mask_ids  of blocks' shape      the mask of each entry: -1 for none, so that the whole block counts. A number that
//             is no mask's lets nothing through
struct BlockLists {
  TensorView blocks;
  TensorView counts;               // entries of a list that count, the first ones; not given: all n
  TensorView offsets;              // int32; not beside counts
  std::int64_t block_size = 64;    // keys: 16, 32, 64 or 128
  std::int64_t query_rows = 1;     // neighbouring rows that share a list, from a sequence's first on; at least 1
  TensorView masks{}, mask_ids{};  // int32; both or neither
};

// As attention_forward and its kin. Not with a draft_mask, a key_step above 1, a method, or a precision other than f32.
std::size_t sparse_attention_forward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                               const BlockLists& lists, const AttentionOptions& options,
                                               const Runtime& runtime = {});
void sparse_attention_forward(const TensorView& q, const TensorView& k, const TensorView& v, const BlockLists& lists,
                              const TensorView& o, const TensorView& lse, const AttentionOptions& options,
                              const Runtime& runtime);
std::vector<Candidate> explain_sparse_attention(const TensorView& q, const TensorView& k, const TensorView& v,
                                                const BlockLists& lists, const AttentionOptions& options,
                                                const Runtime& runtime = {});

// As attention_backward and its kin; no gradient passes through a list. Not with paged keys, cache_batch_idx or
// leftpad.
std::size_t sparse_attention_backward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                                const BlockLists& lists, const AttentionGradients& gradients,
                                                const AttentionOptions& options, const Runtime& runtime = {});
void sparse_attention_backward(const TensorView& q, const TensorView& k, const TensorView& v, const BlockLists& lists,
                               const TensorView& o, const TensorView& lse, const TensorView& d_o,
                               const TensorView& d_lse, const AttentionGradients& gradients,
                               const AttentionOptions& options, const Runtime& runtime);
std::vector<Candidate> explain_sparse_attention_backward(const TensorView& q, const TensorView& k, const TensorView& v,
                                                         const BlockLists& lists, const AttentionGradients& gradients,
                                                         const AttentionOptions& options, const Runtime& runtime = {});

}  // namespace heddle
