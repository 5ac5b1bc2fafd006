#include "cuda/sm80/attention_bwd/launch.cuh"

namespace heddle::cuda::sm80::attention_bwd {

const Variants kF16D128 = variants<__half, 128, Tiling{4, 64, 64, 2, 2, 2, 2}, Tiling{4, 32, 64, 2, 2, 2, 2}>();

}  // namespace heddle::cuda::sm80::attention_bwd
