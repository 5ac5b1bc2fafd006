#include "cuda/sm90/attention_fwd_fp8/launch.cuh"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

const Variant kBf16D64Tokens = variant<Config<__nv_bfloat16, 64, 64, 3, true>>();

}  // namespace heddle::cuda::sm90::attention_fwd_fp8
