// What a launch tells the kernel.
#pragma once

#include <cuda.h>

#include "cuda/any/linear/params.h"

namespace heddle::cuda::sm90::linear {

using cuda::linear::Output, cuda::linear::Schedule;

// Rows of x that a stage has: a tile's tokens, or fewer where there are fewer at all. Rows that a copy lacks and fills
// with zeros take longer than those that exist; those that it leaves out hold anything, and become outputs that nobody
// stores.
constexpr int box_rows(int tokens, std::int64_t m) { return m < tokens ? static_cast<int>((m + 7) / 8 * 8) : tokens; }

template <class WeightBlock>
struct Params {
  // [M, K] as [K / panel][M][panel], panels of 128 bytes, boxes of all that a stage has; by_panel: as [M, K], boxes of
  // a panel.
  CUtensorMap x;
  bool x_by_panel;
  int x_rows;  // of a box: box_rows()
  const WeightBlock* weights;
  Output out;
  Schedule schedule;
};

}  // namespace heddle::cuda::sm90::linear
