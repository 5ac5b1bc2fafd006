// What a launch tells the kernel.
#pragma once

#include <cuda.h>

#include "cuda/sm90/linear/params.h"

namespace heddle::cuda::sm90::linear_w4a8 {

struct Params {
  CUtensorMap x;  // e4m3 [M, K] as [K / 128][M][128], boxes of all that a stage has; by_panel is false
  bool x_by_panel;
  const lowbit::FragmentBlock8* weights;
  linear::Output out;
  linear::Schedule schedule;
};

}  // namespace heddle::cuda::sm90::linear_w4a8
