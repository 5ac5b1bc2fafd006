#include "cuda/sm90/attention_fwd/launch.cuh"

namespace heddle::cuda::sm90::attention_fwd {

const Variant kF16D256Alibi = variant<Config<__half, 256, 256, 64, 2, 2, false, kAlibi>>(DType::f16);

}  // namespace heddle::cuda::sm90::attention_fwd
