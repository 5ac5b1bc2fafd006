#include "cuda/sm80/attention_fwd/launch.cuh"

namespace heddle::cuda::sm80::attention_fwd {

const Variants kF16D64 = variants<__half, 64, 2, 128, 2>();

}  // namespace heddle::cuda::sm80::attention_fwd
