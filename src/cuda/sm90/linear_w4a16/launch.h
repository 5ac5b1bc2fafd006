// The instantiations of the kernel, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/linear/plan.h"
#include "cuda/sm90/linear_w4a16/params.h"

namespace heddle::cuda::sm90::linear_w4a16 {

struct Variant {
  linear::TileShape tile;
  struct {
    int columns, panels;
  } x_box;  // of x in a stage
  void (*launch)(const Params& params, int grid, cudaStream_t stream);
};

extern const Variant kBf16T8, kBf16T16, kBf16T32, kBf16T32R2, kBf16T64, kBf16T128R2, kBf16T128R3, kBf16T256;
extern const Variant kF16T8, kF16T16, kF16T32, kF16T32R2, kF16T64, kF16T128R2, kF16T128R3, kF16T256;

}  // namespace heddle::cuda::sm90::linear_w4a16
