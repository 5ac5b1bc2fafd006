#include "cuda/sm80/attention_decode/launch.cuh"

namespace heddle::cuda::sm80::attention_decode {

const Variant kBf16D64 = variant<__nv_bfloat16, __nv_bfloat16, 64, 4, 4, 2>();

}  // namespace heddle::cuda::sm80::attention_decode
