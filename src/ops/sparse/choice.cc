#include "ops/sparse/choice.h"

#include "cpu/sparse.h"
#include "reference/attention.h"

namespace heddle {

template <>
std::span<const SparseForwardKernel* const> PlainOperation<SparseProblem>::candidates() {
  static const auto kernels =
      with_gpu_kernels<SparseProblem>({&cpu::kSparseAttentionForward, &reference::kSparseAttentionForward});
  return kernels;
}

template <>
std::span<const SparseBackwardKernel* const> PlainOperation<SparseBackwardProblem>::candidates() {
  static const auto kernels =
      with_gpu_kernels<SparseBackwardProblem>({&cpu::kSparseAttentionBackward, &reference::kSparseAttentionBackward});
  return kernels;
}

}  // namespace heddle
