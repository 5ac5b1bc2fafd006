#include "ops/linear/choice.h"

#include "cpu/linear.h"
#include "reference/linear.h"

namespace heddle {

template <>
std::span<const LinearKernel* const> LinearOperation<LinearProblem>::candidates() {
  static const auto kernels = with_gpu_kernels<LinearProblem>({&cpu::kLinear, &reference::kLinear});
  return kernels;
}

template <>
std::span<const LinearBackwardKernel* const> LinearOperation<LinearBackwardProblem>::candidates() {
  static const auto kernels =
      with_gpu_kernels<LinearBackwardProblem>({&cpu::kLinearBackward, &reference::kLinearBackward});
  return kernels;
}

}  // namespace heddle
