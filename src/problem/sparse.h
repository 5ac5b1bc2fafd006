// Attention over lists of key blocks after its arguments were checked (include/heddle/sparse.h).
#pragma once

#include <cstdint>
#include <span>

#include "problem/attention.h"
#include "problem/candidate.h"

namespace heddle {

// Lists as checked; what is in them is not.
struct KeyLists {
  const std::int32_t *blocks = nullptr, *counts = nullptr;  // counts: or null
  std::int64_t stride_b = 0, stride_n = 0, stride_l = 0;    // of lists in `blocks`, elements
  std::int64_t count_stride_b = 0, count_stride_n = 0, count_stride_l = 0;
  std::int64_t units = 1, entries = 0;  // L and n
  std::int64_t block_size = 64, query_rows = 1;
};

struct SparseProblem : AttentionProblem {
  KeyLists lists;

  // Query heads that one list is for; 0: all.
  std::int64_t heads_of_unit() const { return H / lists.units; }

  // The list of row i of sequence b for head unit l; its entries may be anything.
  std::span<const std::int32_t> list(std::int64_t b, const Sequence& s, std::int64_t i, std::int64_t l) const {
    std::int64_t n = i / lists.query_rows;
    if (cu_seqlens_q) n += lists.query_rows == 1 ? s.q_begin : s.q_begin / lists.query_rows + b;
    const std::int64_t batch = cu_seqlens_q ? 0 : b;
    std::int64_t count = lists.entries;
    if (lists.counts != nullptr) {
      count = clamped(lists.counts[batch * lists.count_stride_b + n * lists.count_stride_n + l * lists.count_stride_l],
                      0, lists.entries);
    }
    return {lists.blocks + batch * lists.stride_b + n * lists.stride_n + l * lists.stride_l,
            static_cast<std::size_t>(count)};
  }
};

using SparseForwardKernel = Kernel<SparseProblem>;

}  // namespace heddle
