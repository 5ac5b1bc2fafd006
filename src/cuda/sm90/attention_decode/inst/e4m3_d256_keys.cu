#include "cuda/sm90/attention_decode/launch.cuh"

namespace heddle::cuda::sm90::attention_decode {

const Variant kE4m3D256Keys = variant<Config<__half, 256, 1, true, false, true>>();

}  // namespace heddle::cuda::sm90::attention_decode
