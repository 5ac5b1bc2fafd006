#include "cuda/sm80/attention_fwd/launch.cuh"

namespace heddle::cuda::sm80::attention_fwd {

const Variants kTf32D256 = variants<float, 1, 256, Tiling{4, 1, 16, 2}, Tiling{4, 1, 16, 2}>();

}  // namespace heddle::cuda::sm80::attention_fwd
