#include "cuda/sm80/attention_fwd/launch.cuh"

namespace heddle::cuda::sm80::attention_fwd {

const Variants kF32D64 = variants<float, 3, 64, Tiling{4, 2, 64, 2}, Tiling{4, 1, 32, 3}>();

}  // namespace heddle::cuda::sm80::attention_fwd
