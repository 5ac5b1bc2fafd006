#include "cuda/sm90/attention_decode/launch.cuh"

namespace heddle::cuda::sm90::attention_decode {

const Variant kF16D64Warpgroup = variant<Config<__half, 64, 1, false, true>>();

}  // namespace heddle::cuda::sm90::attention_decode
