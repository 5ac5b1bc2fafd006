#include "ops/kv_cache/choice.h"

#include "cpu/int4_cache.h"
#include "cpu/kv_cache.h"

namespace heddle {

template <>
std::span<const RotaryKernel* const> PlainOperation<RotaryProblem>::candidates() {
  static const auto kernels = with_gpu_kernels<RotaryProblem>({&cpu::kRotary});
  return kernels;
}

template <>
std::span<const AppendKernel* const> PlainOperation<AppendProblem>::candidates() {
  static const auto kernels = with_gpu_kernels<AppendProblem>({&cpu::kKvCacheAppend});
  return kernels;
}

template <>
std::span<const Int4AppendKernel* const> PlainOperation<Int4AppendProblem>::candidates() {
  static const auto kernels = with_gpu_kernels<Int4AppendProblem>({&cpu::kInt4CacheAppend});
  return kernels;
}

}  // namespace heddle
