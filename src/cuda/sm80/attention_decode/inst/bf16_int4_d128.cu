#include "cuda/sm80/attention_decode/int4_launch.cuh"

namespace heddle::cuda::sm80::attention_decode {

const Variant kBf16Int4D128 = int4_variant<__nv_bfloat16, 128>();

}  // namespace heddle::cuda::sm80::attention_decode
