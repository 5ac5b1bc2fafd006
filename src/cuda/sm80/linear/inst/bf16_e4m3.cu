#include "cuda/sm80/linear/decode/bytes.cuh"
#include "cuda/sm80/linear/launch.cuh"

namespace heddle::cuda::sm80::linear {
const Variants kBf16E4M3 = variants<E4M3<__nv_bfloat16>>();
}  // namespace heddle::cuda::sm80::linear
