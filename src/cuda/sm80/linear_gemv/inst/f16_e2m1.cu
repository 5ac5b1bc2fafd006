#include "cuda/sm80/linear_gemv/launch.cuh"

namespace heddle::cuda::sm80::linear_gemv {
const Variants kF16E2M1 = variants<E2M1<__half>>();
}  // namespace heddle::cuda::sm80::linear_gemv
