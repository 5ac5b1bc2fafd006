#include "cuda/sm80/attention_decode/launch.cuh"

namespace heddle::cuda::sm80::attention_decode {

const Variant kF16E4m3D256 = variant<__half, std::uint8_t, 256, 2, 4, 2>();

}  // namespace heddle::cuda::sm80::attention_decode
