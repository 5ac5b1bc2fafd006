#include "ops/lowbit/choice.h"

#include "cpu/lowbit.h"
#include "cpu/unpack_weights.h"
#include "reference/lowbit.h"

namespace heddle {

template <>
std::span<const lowbit::QuantizeKernel* const> PlainOperation<lowbit::QuantizeCall>::candidates() {
  static const auto kernels = with_gpu_kernels<lowbit::QuantizeCall>({&cpu::kQuantize, &reference::kQuantize});
  return kernels;
}

template <>
std::span<const lowbit::DequantizeKernel* const> PlainOperation<lowbit::DequantizeProblem>::candidates() {
  static const auto kernels = with_gpu_kernels<lowbit::DequantizeProblem>({&cpu::kDequantize, &reference::kDequantize});
  return kernels;
}

template <>
std::span<const UnpackKernel* const> PlainOperation<UnpackProblem>::candidates() {
  static const auto kernels = with_gpu_kernels<UnpackProblem>({&cpu::kUnpackWeights});
  return kernels;
}

}  // namespace heddle
