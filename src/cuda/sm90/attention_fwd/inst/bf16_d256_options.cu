#include "cuda/sm90/attention_fwd/launch.cuh"

namespace heddle::cuda::sm90::attention_fwd {

const Variant kBf16D256Options = variant<Config<__nv_bfloat16, 256, 256, 64, 2, 2, false, kAllOptions>>(DType::bf16);

}  // namespace heddle::cuda::sm90::attention_fwd
