#include "cuda/sm80/attention_decode/launch.cuh"

namespace heddle::cuda::sm80::attention_decode {

const Variant kF16D256 = variant<__half, __half, 256, 2, 2, 2>();

}  // namespace heddle::cuda::sm80::attention_decode
