// One instantiation of the kernel, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/any/linear/plan.h"
#include "cuda/sm90/linear/params.h"

namespace heddle::cuda::sm90::linear {

using cuda::linear::TileShape;

template <class WeightBlock>
struct Variant {
  TileShape tile;
  int x_panels;  // in a stage
  void (*launch)(const Params<WeightBlock>& params, int grid, cudaStream_t stream);
  int (*clusters_at_once)(int size);
};

}  // namespace heddle::cuda::sm90::linear
