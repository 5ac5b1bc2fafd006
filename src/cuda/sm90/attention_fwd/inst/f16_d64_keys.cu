#include "cuda/sm90/attention_fwd/launch.cuh"

namespace heddle::cuda::sm90::attention_fwd {

const Variant kF16D64Keys = variant<Config<__half, 64, 64, 128, 3, 2, false, kKeyTerms | kAlibiTerms>>(DType::f16);

}  // namespace heddle::cuda::sm90::attention_fwd
