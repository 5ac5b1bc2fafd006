#include "cuda/any/attention_int8_qk/kernel.cuh"

namespace heddle::cuda::any::attention_int8_qk {

const Kernels kF16D64 = kernels<__half, 64>();
const Kernels kF16D128 = kernels<__half, 128>();

}  // namespace heddle::cuda::any::attention_int8_qk
