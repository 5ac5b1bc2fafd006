#include "cuda/sm90/attention_fwd/launch.cuh"

namespace heddle::cuda::sm90::attention_fwd {

const Variant kBf16D128Keys =
    variant<Config<__nv_bfloat16, 128, 128, 128, 2, 2, true, kKeyTerms | kAlibiTerms>>(DType::bf16);

}  // namespace heddle::cuda::sm90::attention_fwd
