#include "cuda/sm80/attention_fwd/launch.cuh"

namespace heddle::cuda::sm80::attention_fwd {

const Variant kBf16Int8D64 = int8_variant<__nv_bfloat16, 64, Tiling{4, 2, 128, 2}>();

}  // namespace heddle::cuda::sm80::attention_fwd
