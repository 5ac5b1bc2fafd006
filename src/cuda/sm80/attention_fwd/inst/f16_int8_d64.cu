#include "cuda/sm80/attention_fwd/launch.cuh"

namespace heddle::cuda::sm80::attention_fwd {

const Variant kF16Int8D64 = int8_variant<__half, 64, Tiling{4, 2, 128, 2}>();

}  // namespace heddle::cuda::sm80::attention_fwd
