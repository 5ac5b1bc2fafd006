#include "cuda/sm90/attention_fwd/launch.cuh"

namespace heddle::cuda::sm90::attention_fwd {

const Variant kF16D128Keys = variant<Config<__half, 128, 128, 128, 2, 2, true, kKeyTerms | kAlibiTerms>>(DType::f16);

}  // namespace heddle::cuda::sm90::attention_fwd
