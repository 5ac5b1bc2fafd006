#include "cuda/sm80/attention_fwd/launch.cuh"

namespace heddle::cuda::sm80::attention_fwd {

const Variants kBf16D64 = variants<__nv_bfloat16, 1, 64, Tiling{4, 2, 128, 2}, Tiling{4, 1, 64, 3}>();

}  // namespace heddle::cuda::sm80::attention_fwd
