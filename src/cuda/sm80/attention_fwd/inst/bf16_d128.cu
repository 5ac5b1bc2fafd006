#include "cuda/sm80/attention_fwd/launch.cuh"

namespace heddle::cuda::sm80::attention_fwd {

const Variants kBf16D128 = variants<__nv_bfloat16, 1, 128, Tiling{4, 2, 64, 2}, Tiling{4, 1, 64, 2}>();

}  // namespace heddle::cuda::sm80::attention_fwd
