#include "cuda/sm90/attention_fwd/launch.cuh"

namespace heddle::cuda::sm90::attention_fwd {

const Variant kBf16D128Planes = variant<Config<__nv_bfloat16, 128, 128, 128, 2, 2, true, kBulkPlane>>(DType::bf16);

}  // namespace heddle::cuda::sm90::attention_fwd
