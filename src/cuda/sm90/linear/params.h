// What a launch tells the kernel.
#pragma once

#include <cuda.h>

#include "cuda/any/linear/params.h"

namespace heddle::cuda::sm90::linear {

using namespace cuda::linear;

template <class WeightBlock>
struct Params {
  // [M, K] as [K / panel][M][panel], panels of 128 bytes, boxes of all that a stage has; by_panel: as [M, K], boxes of
  // a panel.
  CUtensorMap x;
  bool x_by_panel;
  const WeightBlock* weights;
  Output out;
  Schedule schedule;
};

}  // namespace heddle::cuda::sm90::linear
