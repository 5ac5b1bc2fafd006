#include "cuda/sm80/attention_bwd/launch.cuh"

namespace heddle::cuda::sm80::attention_bwd {

const Variants kF32D64 = variants_f32<3, 64, Tiling{4, 64, 64, 2, 2, 2, 1}>();

}  // namespace heddle::cuda::sm80::attention_bwd
