#include "cuda/sm80/attention_bwd/launch.cuh"

namespace heddle::cuda::sm80::attention_bwd {

const Variants kTf32D128 = variants_f32<1, 128, Tiling{4, 32, 32, 2, 2, 2, 2}>();

}  // namespace heddle::cuda::sm80::attention_bwd
