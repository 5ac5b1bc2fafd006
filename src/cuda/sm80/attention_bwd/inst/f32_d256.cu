#include "cuda/sm80/attention_bwd/launch.cuh"

namespace heddle::cuda::sm80::attention_bwd {

const Variants kF32D256 = variants_f32<3, 256, Tiling{4, 16, 16, 1, 1, 1, 2}>();

}  // namespace heddle::cuda::sm80::attention_bwd
