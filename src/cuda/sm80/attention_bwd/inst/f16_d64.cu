#include "cuda/sm80/attention_bwd/launch.cuh"

namespace heddle::cuda::sm80::attention_bwd {

const Variants kF16D64 = variants<__half, 64, Tiling{4, 128, 64, 4, 2, 4, 2}, Tiling{4, 64, 64, 2, 2, 2, 2}>();

}  // namespace heddle::cuda::sm80::attention_bwd
