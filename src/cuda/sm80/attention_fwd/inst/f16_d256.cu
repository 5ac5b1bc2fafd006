#include "cuda/sm80/attention_fwd/launch.cuh"

namespace heddle::cuda::sm80::attention_fwd {

const Variants kF16D256 = variants<__half, 1, 256, Tiling{4, 1, 64, 2, 8}, Tiling{4, 1, 32, 2}>();

}  // namespace heddle::cuda::sm80::attention_fwd
