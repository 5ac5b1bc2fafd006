#include <cuda_fp16.h>

#include "cuda/sm90/linear_w4a16/launch.cuh"

namespace heddle::cuda::sm90::linear_w4a16 {
const Variant kF16T64R2 = variant<Config<__half, true, 64, 2, 1>>();
}  // namespace heddle::cuda::sm90::linear_w4a16
