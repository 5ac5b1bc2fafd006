#include "cuda/sm90/attention_fwd/launch.cuh"

namespace heddle::cuda::sm90::attention_fwd {

const Variant kF16D192 = variant<Config<__half, 192, 192, 96, 2, 2, false>>(DType::f16);

}  // namespace heddle::cuda::sm90::attention_fwd
