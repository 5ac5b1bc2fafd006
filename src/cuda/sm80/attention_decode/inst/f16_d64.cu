#include "cuda/sm80/attention_decode/launch.cuh"

namespace heddle::cuda::sm80::attention_decode {

const Variant kF16D64 = variant<__half, __half, 64, 4, 4, 2>();

}  // namespace heddle::cuda::sm80::attention_decode
