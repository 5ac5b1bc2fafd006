#include "cuda/sm80/linear/decode/bytes.cuh"
#include "cuda/sm80/linear/launch.cuh"

namespace heddle::cuda::sm80::linear {
const Variants kBf16Int8 = variants<Int8<__nv_bfloat16>>();
}  // namespace heddle::cuda::sm80::linear
