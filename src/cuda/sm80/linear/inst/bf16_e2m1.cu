#include "cuda/sm80/linear/decode/e2m1.cuh"
#include "cuda/sm80/linear/launch.cuh"

namespace heddle::cuda::sm80::linear {
const Variants kBf16E2M1 = variants<E2M1<__nv_bfloat16>>();
}  // namespace heddle::cuda::sm80::linear
