#include "cuda/sm90/attention_fwd_fp8/launch.cuh"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

const Variant kF16D64Tokens = variant<Config<__half, 64, 64, 3, true>>();

}  // namespace heddle::cuda::sm90::attention_fwd_fp8
