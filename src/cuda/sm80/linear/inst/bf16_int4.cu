#include "cuda/sm80/linear/decode/int4.cuh"
#include "cuda/sm80/linear/launch.cuh"

namespace heddle::cuda::sm80::linear {
const Variants kBf16Int4 = variants<Int4<__nv_bfloat16>>();
}  // namespace heddle::cuda::sm80::linear
