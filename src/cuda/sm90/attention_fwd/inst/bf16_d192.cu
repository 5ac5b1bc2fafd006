#include "cuda/sm90/attention_fwd/launch.cuh"

namespace heddle::cuda::sm90::attention_fwd {

const Variant kBf16D192 = variant<Config<__nv_bfloat16, 192, 192, 96, 2, 2, false>>(DType::bf16);

}  // namespace heddle::cuda::sm90::attention_fwd
