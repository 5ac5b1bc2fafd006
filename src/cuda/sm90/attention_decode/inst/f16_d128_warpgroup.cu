#include "cuda/sm90/attention_decode/launch.cuh"

namespace heddle::cuda::sm90::attention_decode {

const Variant kF16D128Warpgroup = variant<Config<__half, 128, 1, false, true>>();

}  // namespace heddle::cuda::sm90::attention_decode
