#include "ops/nsa/choice.h"

#include "cpu/nsa.h"
#include "reference/gate_branches.h"
#include "reference/nsa.h"

namespace heddle {

template <>
std::span<const PoolKernel* const> PlainOperation<PoolProblem>::candidates() {
  static const auto kernels = with_gpu_kernels<PoolProblem>({&cpu::kPoolKeys, &reference::kPoolKeys});
  return kernels;
}

template <>
std::span<const PoolBackwardKernel* const> PlainOperation<PoolBackwardProblem>::candidates() {
  static const auto kernels =
      with_gpu_kernels<PoolBackwardProblem>({&cpu::kPoolKeysBackward, &reference::kPoolKeysBackward});
  return kernels;
}

template <>
std::span<const SelectKernel* const> PlainOperation<SelectProblem>::candidates() {
  static const auto kernels = with_gpu_kernels<SelectProblem>({&cpu::kSelectBlocks, &reference::kSelectBlocks});
  return kernels;
}

template <>
std::span<const GateKernel* const> PlainOperation<GateProblem>::candidates() {
  static const auto kernels = with_gpu_kernels<GateProblem>({&reference::kGateBranches});
  return kernels;
}

template <>
std::span<const GateBackwardKernel* const> PlainOperation<GateBackwardProblem>::candidates() {
  static const auto kernels = with_gpu_kernels<GateBackwardProblem>({&reference::kGateBranchesBackward});
  return kernels;
}

template <>
std::span<const NsaStepKernel* const> PlainOperation<NsaStepProblem>::candidates() {
  static const auto kernels = with_gpu_kernels<NsaStepProblem>({});
  return kernels;
}

}  // namespace heddle
