#include "cuda/sm80/attention_decode/launch.cuh"

namespace heddle::cuda::sm80::attention_decode {

const Variant kBf16D128 = variant<__nv_bfloat16, __nv_bfloat16, 128, 4, 3, 2>();

}  // namespace heddle::cuda::sm80::attention_decode
