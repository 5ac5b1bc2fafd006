#include "cuda/sm90/attention_fwd/launch.cuh"

namespace heddle::cuda::sm90::attention_fwd {

const Variant kBf16D64Planes = variant<Config<__nv_bfloat16, 64, 64, 128, 3, 2, false, kBulkPlane>>(DType::bf16);

}  // namespace heddle::cuda::sm90::attention_fwd
