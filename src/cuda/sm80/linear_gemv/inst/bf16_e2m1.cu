#include "cuda/sm80/linear_gemv/launch.cuh"

namespace heddle::cuda::sm80::linear_gemv {
const Variants kBf16E2M1 = variants<E2M1<__nv_bfloat16>>();
}  // namespace heddle::cuda::sm80::linear_gemv
