#include "cuda/any/attention_int8_qk/kernel.cuh"

namespace heddle::cuda::any::attention_int8_qk {

const Kernels kBf16D64 = kernels<__nv_bfloat16, 64>();
const Kernels kBf16D128 = kernels<__nv_bfloat16, 128>();

}  // namespace heddle::cuda::any::attention_int8_qk
