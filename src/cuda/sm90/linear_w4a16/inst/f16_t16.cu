#include <cuda_fp16.h>

#include "cuda/sm90/linear_w4a16/launch.cuh"

namespace heddle::cuda::sm90::linear_w4a16 {
const Variant kF16T16 = variant<Config<__half, false, 16, 1, 4>>();
}  // namespace heddle::cuda::sm90::linear_w4a16
