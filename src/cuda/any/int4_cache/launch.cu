// The two launches of an append to the cache in 4 bits.
#include <algorithm>
#include <limits>

#include "cuda/any/int4_cache/host.h"
#include "cuda/any/int4_cache/kernel.cuh"
#include "cuda/common/launch.cuh"

namespace heddle::cuda {
namespace {

using namespace any::int4_cache;

unsigned ctas(std::int64_t tasks) {
  return static_cast<unsigned>(std::min<std::int64_t>(tasks, std::numeric_limits<std::int32_t>::max()));
}

template <class T>
void append(const Int4AppendProblem& p, cudaStream_t stream) {
  const std::int64_t filled = (p.S + kInt4Keys - 1) / kInt4Keys, rows = std::min(p.S, kInt4Tail);
  start("append_int4_cache", encode_kernel<T>, {ctas(p.B * p.Hkv * filled), kThreads}, stream, p, filled);
  start("append_int4_cache", ring_kernel<T>, {ctas(p.B * rows), kThreads}, stream, p, rows);
}

}  // namespace

void append_int4_cache(const Int4AppendProblem& p, void* stream) {
  if (p.B * p.S * p.Hkv == 0) return;
  const auto launch = p.k_tail.dtype == DType::f16 ? append<__half> : append<__nv_bfloat16>;
  launch(p, static_cast<cudaStream_t>(stream));
}

}  // namespace heddle::cuda
