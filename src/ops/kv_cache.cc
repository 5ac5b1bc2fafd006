// apply_rotary and append_kv_cache: check everything, then write.
#include "ops/kv_cache.h"

#include "core/runtime.h"
#include "cpu/kv_cache.h"
#include "cuda/kv_cache.h"
#include "ops/kv_cache_arguments.h"
#include "ops/validate.h"

namespace heddle {
void run(const RotaryProblem& p, Device device, const Runtime& runtime) {
  device == Device::cuda ? cuda::apply_rotary(p, runtime.stream) : cpu::apply_rotary(p, executor_of(runtime));
}

void run(const AppendProblem& p, Device device, const Runtime& runtime) {
  device == Device::cuda ? cuda::append_kv_cache(p, runtime.stream) : cpu::append_kv_cache(p, executor_of(runtime));
}

void apply_rotary(const TensorView& x, const TensorView& out, const Rotary& rotary, const TensorView& offsets,
                  const Runtime& runtime) {
  const RotaryProblem p = checked_rotary_problem(Check("apply_rotary"), x, out, rotary, offsets);
  if (validates(runtime, x.device)) {
    cuda::check_indices("apply_rotary", RotaryIndices{p, RotaryNames().offsets}, runtime.stream);
  }
  run(p, x.device, runtime);
}

void append_kv_cache(const TensorView& k_new, const TensorView& v_new, const TensorView& k_cache,
                     const TensorView& v_cache, const TensorView& seqlens, const TensorView& page_table,
                     const TensorView& cache_batch_idx, const Rotary& rotary, const Runtime& runtime,
                     const TensorView& k_scale, const TensorView& v_scale) {
  const AppendProblem p = checked_append_problem(Check("append_kv_cache"), k_new, v_new, k_cache, v_cache, seqlens,
                                                 page_table, cache_batch_idx, rotary, k_scale, v_scale);
  if (validates(runtime, k_new.device)) {
    cuda::check_indices("append_kv_cache", AppendIndices{p, IndexName::seqlens}, runtime.stream);
  }
  run(p, k_new.device, runtime);
}

}  // namespace heddle
