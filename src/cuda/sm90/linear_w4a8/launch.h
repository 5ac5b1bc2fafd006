// The instantiations of the kernel, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/linear/plan.h"
#include "cuda/sm90/linear_w4a8/params.h"

namespace heddle::cuda::sm90::linear_w4a8 {

struct Variant {
  linear::TileShape tile;
  struct {
    int columns, panels;
  } x_box;  // of x in a stage
  void (*launch)(const Params& params, int grid, cudaStream_t stream);
};

extern const Variant kBf16T64, kBf16T128;
extern const Variant kF16T64, kF16T128;

}  // namespace heddle::cuda::sm90::linear_w4a8
