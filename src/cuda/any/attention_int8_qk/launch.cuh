// Starts the kernels, one after the other.
#pragma once

#include "cuda/any/attention_int8_qk/kernel.cuh"
#include "cuda/any/attention_int8_qk/variants.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"

namespace heddle::cuda::any::attention_int8_qk {

template <class T, int kPitch>
void launch(const Params& params, cudaStream_t stream) {
  constexpr const char* kOperation = "attention_forward";
  const auto heads = static_cast<unsigned>(params.problem.B * params.problem.Hkv);
  start(kOperation, mean_keys_kernel<T, kPitch>, {heads, 256}, stream, params);
  start(kOperation, quantize_kernel<T, kPitch>, {params.key_launches + params.row_launches, threads_for(kPitch)},
        stream, params);
}

template <DType kType, int kRow>
Variant Instance<kType, kRow>::variant() {
  constexpr Row row = kVariants[kRow];
  return {row, kType, launch<ElementOf<kType>, row.pitch>};
}

}  // namespace heddle::cuda::any::attention_int8_qk
