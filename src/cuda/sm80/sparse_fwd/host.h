// The launch, and its memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem/sparse.h"

namespace heddle::cuda::sm80::sparse_fwd {

constexpr int kMostSlots = 1024;

// How a call is cut: its partial results are those of some lists at a time, as many as `kPartialBytes` hold.
struct Plan {
  std::int64_t units, group, rows;  // as in Params
  std::int64_t lists, lists_at_once;
  std::int64_t blocks;
  std::int64_t pairs_of_item, item_limit;
  int head;  // 64 or 128: columns of q, k and v in shared memory
  std::size_t bytes;
};

constexpr std::size_t kPartialBytes = std::size_t{1} << 30;

Plan plan_of(const SparseProblem& problem);
void launch(const SparseProblem& problem, void* memory, void* stream);

}  // namespace heddle::cuda::sm80::sparse_fwd
