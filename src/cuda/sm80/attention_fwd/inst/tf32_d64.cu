#include "cuda/sm80/attention_fwd/launch.cuh"

namespace heddle::cuda::sm80::attention_fwd {

const Variants kTf32D64 = variants<float, 1, 64, Tiling{4, 2, 64, 2}, Tiling{4, 1, 64, 3}>();

}  // namespace heddle::cuda::sm80::attention_fwd
