#include "cuda/sm90/attention_decode/launch.cuh"

namespace heddle::cuda::sm90::attention_decode {

const Variant kBf16D128Wide = variant<Config<__nv_bfloat16, 128, 2, false>>();

}  // namespace heddle::cuda::sm90::attention_decode
