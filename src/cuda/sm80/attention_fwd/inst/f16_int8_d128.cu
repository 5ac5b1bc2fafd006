#include "cuda/sm80/attention_fwd/launch.cuh"

namespace heddle::cuda::sm80::attention_fwd {

const Variant kF16Int8D128 = int8_variant<__half, 128, Tiling{4, 2, 64, 2}>();

}  // namespace heddle::cuda::sm80::attention_fwd
