#include "cuda/sm80/linear/decode/bytes.cuh"
#include "cuda/sm80/linear/launch.cuh"

namespace heddle::cuda::sm80::linear {
const Variants kF16E4M3 = variants<E4M3<__half>>();
}  // namespace heddle::cuda::sm80::linear
