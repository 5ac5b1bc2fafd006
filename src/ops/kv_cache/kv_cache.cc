// apply_rotary, append_kv_cache and what explains them: check, ask each candidate, choose, launch.
#include "heddle/kv_cache.h"

#include "core/runtime.h"
#include "ops/kv_cache/arguments.h"
#include "ops/kv_cache/choice.h"
#include "ops/validate.h"

namespace heddle {

void apply_rotary(const TensorView& x, const TensorView& out, const Rotary& rotary, const RotaryOptions& options,
                  const Runtime& runtime) {
  const Check check("apply_rotary");
  const RotaryProblem p = checked_rotary_problem(check, x, out, rotary, options.offsets);
  const RotaryKernel& kernel = choose(check, p, wish_of<RotaryProblem>(check, options.force), workers_of(runtime));
  if (validates(runtime, p.device)) {
    cuda::check_indices("apply_rotary", RotaryIndices{p, RotaryNames().offsets}, runtime.stream);
  }
  run(check, "apply_rotary", kernel, p, runtime, kernel.workspace(p, workers_of(runtime)));
}

std::vector<Candidate> explain_apply_rotary(const TensorView& x, const TensorView& out, const Rotary& rotary,
                                            const RotaryOptions& options, const Runtime& runtime) {
  const Check check("explain_apply_rotary", Data::to_come);
  return explained(checked_rotary_problem(check, x, out, rotary, options.offsets),
                   wish_of<RotaryProblem>(check, options.force), workers_of(runtime));
}

void append_kv_cache(const TensorView& k_new, const TensorView& v_new, const TensorView& k_cache,
                     const TensorView& v_cache, const TensorView& seqlens, const AppendOptions& options,
                     const Runtime& runtime) {
  const Check check("append_kv_cache");
  const AppendProblem p = checked_append_problem(check, k_new, v_new, k_cache, v_cache, seqlens, options);
  const AppendKernel& kernel = choose(check, p, wish_of<AppendProblem>(check, options.force), workers_of(runtime));
  if (validates(runtime, p.device)) {
    cuda::check_indices("append_kv_cache", AppendIndices{p, IndexName::seqlens}, runtime.stream);
  }
  run(check, "append_kv_cache", kernel, p, runtime, kernel.workspace(p, workers_of(runtime)));
}

std::vector<Candidate> explain_append_kv_cache(const TensorView& k_new, const TensorView& v_new,
                                               const TensorView& k_cache, const TensorView& v_cache,
                                               const TensorView& seqlens, const AppendOptions& options,
                                               const Runtime& runtime) {
  const Check check("explain_append_kv_cache", Data::to_come);
  return explained(checked_append_problem(check, k_new, v_new, k_cache, v_cache, seqlens, options),
                   wish_of<AppendProblem>(check, options.force), workers_of(runtime));
}

}  // namespace heddle
