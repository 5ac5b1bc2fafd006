#include "cuda/sm90/attention_fwd/launch.cuh"

namespace heddle::cuda::sm90::attention_fwd {

const Variant kF16D128Softcap = variant<Config<__half, 128, 128, 128, 2, 2, false, kSoftcap>>(DType::f16);

}  // namespace heddle::cuda::sm90::attention_fwd
