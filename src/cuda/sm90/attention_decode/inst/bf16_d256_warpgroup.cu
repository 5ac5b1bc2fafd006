#include "cuda/sm90/attention_decode/launch.cuh"

namespace heddle::cuda::sm90::attention_decode {

const Variant kBf16D256Warpgroup = variant<Config<__nv_bfloat16, 256, 1, false, true>>();

}  // namespace heddle::cuda::sm90::attention_decode
