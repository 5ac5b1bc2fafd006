#include "cuda/sm90/attention_fwd/launch.cuh"

namespace heddle::cuda::sm90::attention_fwd {

const Variant kBf16D64Softcap = variant<Config<__nv_bfloat16, 64, 64, 128, 3, 2, false, kSoftcap>>(DType::bf16);

}  // namespace heddle::cuda::sm90::attention_fwd
