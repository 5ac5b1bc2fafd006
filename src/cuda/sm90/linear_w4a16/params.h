// What a launch tells the kernel.
#pragma once

#include <cuda.h>

#include "cuda/sm90/linear/params.h"

namespace heddle::cuda::sm90::linear_w4a16 {

struct Params {
  // 16-bit [M, K]. As [K / 64][M][64], boxes of all that a stage has; by_panel: as [M, K], boxes of 64 columns.
  CUtensorMap x;
  bool x_by_panel;
  const lowbit::FragmentBlock* weights;
  linear::Output out;
  linear::Schedule schedule;
};

}  // namespace heddle::cuda::sm90::linear_w4a16
