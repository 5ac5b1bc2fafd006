#include "cuda/sm80/linear/decode/lookup.cuh"
#include "cuda/sm80/linear/launch.cuh"

namespace heddle::cuda::sm80::linear {
const Variants kF16Lookup = variants<Lookup<__half>>();
}  // namespace heddle::cuda::sm80::linear
