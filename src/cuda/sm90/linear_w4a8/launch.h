// The instantiations of the kernel, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/linear/plan.h"
#include "cuda/sm90/linear_w4a8/params.h"
#include "heddle/tensor.h"

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

// x: [rows, columns] f16 or bf16, `stride` elements apart, to e4m3 [rows, pitch], zeros behind the columns, each row
// divided by its scale: of the largest magnitude 448 is made. A row that is not finite has scale NaN.
void quantize_rows(DType dtype, const void* x, std::int64_t stride, int rows, int columns, int pitch, std::uint8_t* to,
                   float* scales, cudaStream_t stream);

}  // namespace heddle::cuda::sm90::linear_w4a8
