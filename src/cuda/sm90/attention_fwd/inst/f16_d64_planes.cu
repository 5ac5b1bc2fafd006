#include "cuda/sm90/attention_fwd/launch.cuh"

namespace heddle::cuda::sm90::attention_fwd {

const Variant kF16D64Planes = variant<Config<__half, 64, 64, 128, 3, 2, false, kBulkPlane>>(DType::f16);

}  // namespace heddle::cuda::sm90::attention_fwd
