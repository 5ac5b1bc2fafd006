#include "cuda/sm80/linear/decode/bytes.cuh"
#include "cuda/sm80/linear/launch.cuh"

namespace heddle::cuda::sm80::linear {
const Variants kF16Int8 = variants<Int8<__half>>();
}  // namespace heddle::cuda::sm80::linear
