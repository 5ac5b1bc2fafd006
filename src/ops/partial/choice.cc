#include "ops/partial/choice.h"

#include "cpu/partial.h"
#include "reference/partial.h"

namespace heddle {

template <>
std::span<const MergeKernel* const> PlainOperation<MergeProblem>::candidates() {
  static const auto kernels = with_gpu_kernels<MergeProblem>({&cpu::kMergeAttention, &reference::kMergeAttention});
  return kernels;
}

template <>
std::span<const MergeBackwardKernel* const> PlainOperation<MergeBackwardProblem>::candidates() {
  static const auto kernels =
      with_gpu_kernels<MergeBackwardProblem>({&cpu::kMergeAttentionBackward, &reference::kMergeAttentionBackward});
  return kernels;
}

}  // namespace heddle
