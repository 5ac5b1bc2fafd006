#include "ops/adaptive/choice.h"

#include "cpu/adaptive.h"
#include "reference/adaptive.h"

namespace heddle {

template <>
std::span<const AdaptiveForwardKernel* const> PlainOperation<AdaptiveProblem>::candidates() {
  static const AdaptiveForwardKernel* const kernels[] = {&cpu::kAdaptiveAttentionForward,
                                                         &reference::kAdaptiveAttentionForward};
  return kernels;
}

template <>
std::span<const AdaptiveBackwardKernel* const> PlainOperation<AdaptiveBackwardProblem>::candidates() {
  static const AdaptiveBackwardKernel* const kernels[] = {&cpu::kAdaptiveAttentionBackward,
                                                          &reference::kAdaptiveAttentionBackward};
  return kernels;
}

}  // namespace heddle
