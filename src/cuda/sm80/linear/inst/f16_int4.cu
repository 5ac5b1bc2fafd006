#include "cuda/sm80/linear/decode/int4.cuh"
#include "cuda/sm80/linear/launch.cuh"

namespace heddle::cuda::sm80::linear {
const Variants kF16Int4 = variants<Int4<__half>>();
}  // namespace heddle::cuda::sm80::linear
