// What is known of a position before a choice, and how its list is written after it.
#pragma once

#include "cuda/common/sparse/best_blocks.cuh"
#include "cuda/common/sparse/listing.h"
#include "problem/select_blocks.h"

namespace heddle::cuda::sparse {

// Of the position of a sequence's `row`; `of` is in shared memory. SelectProblem::forced_at(), without memory of its
// own.
__device__ __forceinline__ void find_listing(const SelectProblem& problem, const Sequence& s, std::int64_t row,
                                             Listing& of) {
  const std::int64_t t = problem.position(s, row), seen = problem.seen(s, t);
  of = {static_cast<int>(seen), static_cast<int>(problem.touched(seen)), {-1, -1, -1}, 0};
  int last = -1;
  const auto add = [&](int block) {
    if (block > last) last = of.forced[of.taken++] = block;
  };
  const int current = static_cast<int>(t / problem.block_size);
  if (problem.forced.first) add(0);
  if (problem.forced.previous) add(current - 1);
  if (problem.forced.current) add(current);
}

// The forced blocks, then those of `kept`, the best first, with zeros behind them. One warp.
__device__ __forceinline__ void write_list(const Listing& of, std::int32_t* list, int slots, const Key* kept,
                                           int lane) {
  if (lane < min(of.taken, slots)) list[lane] = of.forced[lane];
  for (int n = lane; n < slots - of.taken; n += kWarp) {
    const Key key = kept[n];
    list[of.taken + n] = key == 0 ? -1 : block_of(key);
  }
}

}  // namespace heddle::cuda::sparse
