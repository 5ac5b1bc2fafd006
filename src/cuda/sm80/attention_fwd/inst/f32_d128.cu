#include "cuda/sm80/attention_fwd/launch.cuh"

namespace heddle::cuda::sm80::attention_fwd {

const Variants kF32D128 = variants<float, 3, 128, Tiling{4, 2, 32, 2}, Tiling{4, 1, 32, 3}>();

}  // namespace heddle::cuda::sm80::attention_fwd
