#include <cuda_fp16.h>

#include "cuda/sm90/linear_w4a8/launch.cuh"

namespace heddle::cuda::sm90::linear_w4a8 {
const Variant<FragmentBlock8> kF16T64R2 = variant<Config<__half, FragmentBlock8, 64, 2, 0>>();
}  // namespace heddle::cuda::sm90::linear_w4a8
