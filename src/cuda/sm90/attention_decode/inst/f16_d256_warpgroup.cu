#include "cuda/sm90/attention_decode/launch.cuh"

namespace heddle::cuda::sm90::attention_decode {

const Variant kF16D256Warpgroup = variant<Config<__half, 256, 1, false, true>>();

}  // namespace heddle::cuda::sm90::attention_decode
