#include "cuda/sm80/attention_decode/launch.cuh"

namespace heddle::cuda::sm80::attention_decode {

const Variant kBf16E4m3D128 = variant<__nv_bfloat16, std::uint8_t, 128, 4, 4, 2>();

}  // namespace heddle::cuda::sm80::attention_decode
