#include <cuda_fp16.h>

#include "cuda/sm90/linear_w4a16/launch.cuh"

namespace heddle::cuda::sm90::linear_w4a16 {
const Variant kF16T8 = variant<Config<__half, false, 8, 1, 4>>();
}  // namespace heddle::cuda::sm90::linear_w4a16
