#include "cuda/sm80/attention_bwd/launch.cuh"

namespace heddle::cuda::sm80::attention_bwd {

const Variants kF16D256 = variants_large<__half, 256, Tiling{8, 128, 64, 4, 2, 4, 1}, Tiling{8, 64, 64, 4, 2, 2, 1},
                                         Tiling{4, 32, 32, 2, 1, 1, 2}>();

}  // namespace heddle::cuda::sm80::attention_bwd
