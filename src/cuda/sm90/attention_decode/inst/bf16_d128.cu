#include "cuda/sm90/attention_decode/launch.cuh"

namespace heddle::cuda::sm90::attention_decode {

const Variant kBf16D128 = variant<Config<__nv_bfloat16, 128, 1, false>>();

}  // namespace heddle::cuda::sm90::attention_decode
