#include "cuda/sm90/attention_decode/launch.cuh"

namespace heddle::cuda::sm90::attention_decode {

const Variant kE4m3D64WideKeys = variant<Config<__half, 64, 2, true, false, true>>();

}  // namespace heddle::cuda::sm90::attention_decode
