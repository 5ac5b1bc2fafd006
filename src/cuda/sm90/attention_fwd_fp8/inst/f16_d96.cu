#include "cuda/sm90/attention_fwd_fp8/launch.cuh"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

const Variant kF16D96 = variant<Config<__half, 96, 96, 3>>();

}  // namespace heddle::cuda::sm90::attention_fwd_fp8
