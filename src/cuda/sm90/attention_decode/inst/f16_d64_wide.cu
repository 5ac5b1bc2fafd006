#include "cuda/sm90/attention_decode/launch.cuh"

namespace heddle::cuda::sm90::attention_decode {

const Variant kF16D64Wide = variant<Config<__half, 64, 2, false>>();

}  // namespace heddle::cuda::sm90::attention_decode
