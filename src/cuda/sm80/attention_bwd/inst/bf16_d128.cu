#include "cuda/sm80/attention_bwd/launch.cuh"

namespace heddle::cuda::sm80::attention_bwd {

const Variants kBf16D128 = variants<__nv_bfloat16, 128, Tiling{4, 64, 64, 2, 2, 2, 2}, Tiling{4, 32, 64, 2, 2, 2, 2}>();

}  // namespace heddle::cuda::sm80::attention_bwd
