#include "cuda/sm90/attention_decode/launch.cuh"

namespace heddle::cuda::sm90::attention_decode {

const Variant kF16D128Wide = variant<Config<__half, 128, 2, false>>();

}  // namespace heddle::cuda::sm90::attention_decode
