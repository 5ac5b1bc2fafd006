#include "cuda/sm90/attention_fwd/launch.cuh"

namespace heddle::cuda::sm90::attention_fwd {

const Variant kF16D64Options = variant<Config<__half, 64, 64, 128, 2, 2, true, kAllOptions>>(DType::f16);

}  // namespace heddle::cuda::sm90::attention_fwd
