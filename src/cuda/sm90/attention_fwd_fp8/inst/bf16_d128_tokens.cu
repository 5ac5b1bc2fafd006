#include "cuda/sm90/attention_fwd_fp8/launch.cuh"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

const Variant kBf16D128Tokens = variant<Config<__nv_bfloat16, 128, 128, 3, true>>();

}  // namespace heddle::cuda::sm90::attention_fwd_fp8
