#include <cuda_bf16.h>

#include "cuda/sm90/attention_bwd/launch.cuh"

namespace heddle::cuda::sm90::attention_bwd {
const Variant kBf16D64Softcap = variant<Config<__nv_bfloat16, 64, 128, Option::kSoftcap>>();
}  // namespace heddle::cuda::sm90::attention_bwd
