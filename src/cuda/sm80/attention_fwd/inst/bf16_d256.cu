#include "cuda/sm80/attention_fwd/launch.cuh"

namespace heddle::cuda::sm80::attention_fwd {

const Variants kBf16D256 = variants<__nv_bfloat16, 256, 1, 64, 2>();

}  // namespace heddle::cuda::sm80::attention_fwd
