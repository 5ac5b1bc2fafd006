// What a launch tells the kernel.
#pragma once

#include "cuda/any/linear/params.h"
#include "cuda/any/linear/rows.h"

namespace heddle::cuda::sm80::linear_gemv {

using cuda::linear::NormInFront, cuda::linear::Output, cuda::linear::kBlockRows;

struct Params {
  const void* x;  // [m, k], rows x_stride elements apart and aligned to 16 bytes
  std::int64_t x_stride;
  int k, k_blocks, row_blocks;
  const std::byte* weights;  // blocks, [row_blocks][k_blocks]
  NormInFront norm;
  Output out;
};

}  // namespace heddle::cuda::sm80::linear_gemv
