#include "cuda/sm80/attention_decode/launch.cuh"

namespace heddle::cuda::sm80::attention_decode {

const Variant kF16D128 = variant<__half, __half, 128, 4, 3, 2>();

}  // namespace heddle::cuda::sm80::attention_decode
