#include "cuda/sm80/linear/decode/lookup.cuh"
#include "cuda/sm80/linear/launch.cuh"

namespace heddle::cuda::sm80::linear {
const Variants kBf16Lookup = variants<Lookup<__nv_bfloat16>>();
}  // namespace heddle::cuda::sm80::linear
