#include "cuda/sm90/attention_decode/launch.cuh"

namespace heddle::cuda::sm90::attention_decode {

const Variant kBf16D64Wide = variant<Config<__nv_bfloat16, 64, 2, false>>();

}  // namespace heddle::cuda::sm90::attention_decode
