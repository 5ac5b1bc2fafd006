#include "cuda/sm80/attention_fwd/launch.cuh"

namespace heddle::cuda::sm80::attention_fwd {

const Variants kBf16D64 = variants<__nv_bfloat16, 64, 2, 128, 2>();

}  // namespace heddle::cuda::sm80::attention_fwd
