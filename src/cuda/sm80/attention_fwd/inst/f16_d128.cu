#include "cuda/sm80/attention_fwd/launch.cuh"

namespace heddle::cuda::sm80::attention_fwd {

const Variants kF16D128 = variants<__half, 128, 2, 64, 2>();

}  // namespace heddle::cuda::sm80::attention_fwd
