// Attention over lists of key blocks after its arguments were checked (include/heddle/sparse.h).
#pragma once

#include <cstdint>
#include <span>

#include "problem/attention.h"
#include "problem/candidate.h"

namespace heddle {

// Lists as checked; what is in them is not.
struct KeyLists {
  const std::int32_t *blocks = nullptr, *counts = nullptr, *offsets = nullptr;  // counts or offsets, or neither
  std::int64_t stride_b = 0, stride_n = 0, stride_l = 0;                        // of lists in `blocks`, elements
  std::int64_t count_stride_b = 0, count_stride_n = 0, count_stride_l = 0;      // of counts or offsets
  std::int64_t units = 1, entries = 0;  // L, and n, or all entries beside offsets
  std::int64_t typical = 0;             // entries of a list: n, or the mean
  std::int64_t block_size = 64, query_rows = 1;
  bool by_offsets = false;  // there are offsets, though they may be to come
  bool masked = false;      // the rest is there then
  const std::int32_t *masks = nullptr, *mask_ids = nullptr;
  std::int64_t mask_count = 0;                                           // M
  std::int64_t mask_stride_b = 0, mask_stride_n = 0, mask_stride_l = 0;  // of lists in `mask_ids`, elements

  // The list of row i of sequence b for head unit l; its entries may be anything.
  constexpr std::span<const std::int32_t> list(const AttentionProblem& p, std::int64_t b, const Sequence& s,
                                               std::int64_t i, std::int64_t l) const {
    const std::int64_t n = number(p, b, s, i), batch = p.cu_seqlens_q.given ? 0 : b;
    if (offsets != nullptr) {
      const std::int32_t* at = offsets + batch * count_stride_b + n * count_stride_n + l * count_stride_l;
      const std::int64_t begin = clamped(at[0], 0, entries), end = clamped(at[count_stride_n], begin, entries);
      return {blocks + begin, static_cast<std::size_t>(end - begin)};
    }
    std::int64_t count = entries;
    if (counts != nullptr) {
      count = clamped(counts[batch * count_stride_b + n * count_stride_n + l * count_stride_l], 0, entries);
    }
    return {blocks + batch * stride_b + n * stride_n + l * stride_l, static_cast<std::size_t>(count)};
  }
  // The masks of its entries, as many; they may be any numbers.
  constexpr const std::int32_t* ids(const AttentionProblem& p, std::int64_t b, const Sequence& s, std::int64_t i,
                                    std::int64_t l) const {
    if (offsets != nullptr) return mask_ids + (list(p, b, s, i, l).data() - blocks);
    const std::int64_t batch = p.cu_seqlens_q.given ? 0 : b;
    return mask_ids + batch * mask_stride_b + number(p, b, s, i) * mask_stride_n + l * mask_stride_l;
  }

  constexpr std::int64_t mask_words() const { return (block_size + 31) / 32; }
  // The words of mask `id` for row i of a sequence; null if there is no such mask.
  constexpr const std::int32_t* mask_row(std::int32_t id, std::int64_t i) const {
    return id < 0 || id >= mask_count ? nullptr : masks + (id * query_rows + i % query_rows) * mask_words();
  }
  // Whether an entry with mask `id` lets row i attend key j, both of the sequence.
  constexpr bool lets(std::int32_t id, std::int64_t i, std::int64_t j) const {
    if (id == -1) return true;
    const std::int32_t* row = mask_row(id, i);
    const std::int64_t bit = j % block_size;
    return row != nullptr && (static_cast<std::uint32_t>(row[bit / 32]) >> (bit % 32) & 1u) != 0;
  }

 private:
  // Of the list of row i among those of its head unit.
  constexpr std::int64_t number(const AttentionProblem& p, std::int64_t b, const Sequence& s, std::int64_t i) const {
    const std::int64_t n = i / query_rows;
    if (!p.cu_seqlens_q.given) return n;
    return n + (query_rows == 1 ? s.q_begin : s.q_begin / query_rows + b);
  }
};

// A call without options over sequences of S rows and keys, q, k and v drawn at random; each kv head has lists of its
// own, of blocks drawn at random, no two of a list the same.
struct SparseExample {
  DType dtype;
  std::int64_t B, H, Hkv, S, D;
  std::int64_t query_rows, block_size, entries;

  constexpr std::int64_t lists() const { return (S + query_rows - 1) / query_rows; }  // of a kv head in a sequence
};

struct SparseProblem : AttentionProblem {
  using Example = SparseExample;

  KeyLists lists;
};
struct SparseBackwardProblem : AttentionBackwardProblem {
  using Example = SparseExample;

  KeyLists lists;
};

using SparseForwardKernel = Kernel<SparseProblem>;
using SparseBackwardKernel = Kernel<SparseBackwardProblem>;

}  // namespace heddle
