// attention_with_kv_cache: one launch where a candidate appends by itself, else append, rotate, attend.
#include "ops/attention/arguments.h"
#include "ops/attention/attention.h"
#include "ops/attention/choice.h"
#include "ops/kv_cache/arguments.h"
#include "ops/kv_cache/choice.h"
#include "ops/validate.h"

namespace heddle {
namespace {

constexpr IndexName kLengthsName = IndexName::seqused_k;

struct Call {
  AttentionProblem problem;  // over the cache, the new keys counted; with `append` if the kernel writes them itself
  AppendProblem append;
  RotaryProblem rotary;  // of q, into the workspace
  const AttentionForwardKernel* kernel = nullptr;
  std::size_t kernel_bytes = 0, rotated_bytes = 0;  // of the workspace; q's copy comes first
};

KeyNames key_names(IndexName lengths_name) {
  return {.k = IndexName::k_cache, .v = IndexName::v_cache, .seqused_k = lengths_name};
}

// A q of its own, contiguous, aligned as the workspace is, which may be to come.
Operand contiguous_rows(const AttentionProblem& p, void* data) {
  Operand x = p.q;
  x.data = static_cast<std::byte*>(data);
  x.alignment = 64;
  x.stride_d = 1;
  x.stride_h = p.D;
  x.stride_s = p.H * p.D;
  x.stride_b = p.Sq * p.H * p.D;
  return x;
}

Call checked_call(const Check& check, const TensorView& q, const TensorView& k_new, const TensorView& v_new,
                  const TensorView& k_cache, const TensorView& v_cache, const TensorView& o, const TensorView& lse,
                  const Rotary& rotary, const AttentionOptions& options, const Runtime& runtime, IndexName lengths_name,
                  const OutputNames& outputs) {
  check.require(options.seqused_k.given(), lengths_name, " is missing: it says where each sequence's new keys go");
  check.require(!options.cu_seqlens_q.given() && !options.cu_seqlens_k.given(),
                "cu_seqlens_q and cu_seqlens_k are not taken: q is [B, Sq, H, D] and keys are in a cache");
  check.require(!options.q_offset.given() && !options.key_offset.given(),
                "q_offset and key_offset are not taken: positions are those of the cache");
  check.require(options.q_step == 1 && options.key_step == 1, "q_step is ", options.q_step, " and key_step is ",
                options.key_step, ": both must be 1, as positions are those of the cache");
  Call call;
  AttentionProblem& p = call.problem;
  p = checked_forward_problem(check, q, k_cache, v_cache, o, lse, options, {key_names(lengths_name)}, outputs);
  // What an append reads, too.
  check_apart(
      check, std::array{Named{outputs.o, &o}, Named{outputs.lse, &lse}},
      std::array{Named{"k_new", &k_new}, Named{"v_new", &v_new}, Named{"cos", &rotary.cos}, Named{"sin", &rotary.sin}});
  check.require(k_new.given() && k_new.rank == 4 && k_new.shape[0] == p.B, "k_new is ", k_new,
                ": it must be [B, Sn, Hkv, D] with q's B, ", p.B);
  check.require(k_new.dtype == q.dtype, "k_new is ", name_of(k_new.dtype), ": it must have q's dtype, ",
                name_of(q.dtype));
  call.append = checked_append_problem(check, k_new, v_new, k_cache, v_cache, options.seqused_k,
                                       {.rotary = rotary,
                                        .page_table = options.page_table,
                                        .cache_batch_idx = options.cache_batch_idx,
                                        .k_scale = options.k_scale,
                                        .v_scale = options.v_scale},
                                       lengths_name);
  p.k_appended = call.append.S;
  const bool rotates = call.append.rotary.dims > 0;
  const bool by_row = p.causal != Causal::none || p.window_left >= 0 || p.window_right >= 0;
  if (rotates) {
    // Rows that all stand at one position are rotated one by one.
    TensorView rows = q;
    if (!by_row) rows.shape[1] = std::min<std::int64_t>(rows.shape[1], 1);
    call.rotary =
        checked_rotary_problem(check, rows, rows, rotary, options.seqused_k, {.x = "q", .offsets = lengths_name});
  }

  const int workers = workers_of(runtime);
  p.append = {call.append.k_new,         call.append.v_new,        call.append.rotary, by_row,
              call.append.finds_k_scale, call.append.finds_v_scale};
  const Wish wish = attention_wish<AttentionProblem>(check, options);
  call.kernel = find(p, wish, workers);
  if (call.kernel == nullptr) {
    p.append = {};
    if (rotates) {
      call.rotated_bytes = (static_cast<std::size_t>(p.B * p.Sq * p.H * p.D) * size_of(p.dtype) + 63) / 64 * 64;
      p.q = contiguous_rows(p, nullptr);
    }
    call.kernel = &choose(check, p, wish, workers);
  }
  call.kernel_bytes = call.kernel->workspace(p, workers);
  return call;
}

// A step before the attention, by the candidate that the operation itself would choose.
template <class Problem>
const Kernel<Problem>& step_of(const Check& check, const Problem& problem, const Runtime& runtime) {
  return choose(check, problem, wish_of<Problem>(check, ""), workers_of(runtime));
}

// The call's workspace is the attention's and q's: a step has none.
template <class Problem>
void run_step(const Check& check, const Kernel<Problem>& kernel, const Problem& problem, const Runtime& runtime) {
  Runtime without = runtime;
  without.workspace = {};
  run(check, "attention_with_kv_cache", kernel, problem, without, kernel.workspace(problem, workers_of(runtime)));
}

void rotate_rows(const Check& check, Call& call, std::int64_t rows, const Runtime& runtime) {
  AttentionProblem& p = call.problem;
  p.q = contiguous_rows(p, runtime.workspace.data);
  RotaryProblem step = call.rotary;
  step.out = p.q;
  const RotaryKernel& kernel = step_of(check, step, runtime);
  for (std::int64_t i = 0; i < rows; i += step.S) {
    step.x.data = call.rotary.x.at(0, i, 0);
    step.out.data = p.q.at(0, i, 0);
    run_step(check, kernel, step, runtime);
  }
}

}  // namespace

std::size_t attention_with_kv_cache_workspace(const TensorView& q, const TensorView& k_new, const TensorView& v_new,
                                              const TensorView& k_cache, const TensorView& v_cache,
                                              const Rotary& rotary, const AttentionOptions& options,
                                              const Runtime& runtime) {
  const Check check("attention_with_kv_cache", Data::to_come);
  const Call call =
      checked_call(check, q, k_new, v_new, k_cache, v_cache, {}, {}, rotary, options, runtime, kLengthsName, {});
  return call.rotated_bytes + call.kernel_bytes;
}

void attention_with_kv_cache(const TensorView& q, const TensorView& k_new, const TensorView& v_new,
                             const TensorView& k_cache, const TensorView& v_cache, const TensorView& o,
                             const TensorView& lse, const Rotary& rotary, const AttentionOptions& options,
                             const Runtime& runtime) {
  attention_with_kv_cache_with(
      q, k_new, v_new, k_cache, v_cache, o, lse, rotary, options, runtime,
      [&](std::size_t) { return runtime.workspace; }, kLengthsName);
}

void attention_with_kv_cache_with(const TensorView& q, const TensorView& k_new, const TensorView& v_new,
                                  const TensorView& k_cache, const TensorView& v_cache, const TensorView& o,
                                  const TensorView& lse, const Rotary& rotary, const AttentionOptions& options,
                                  const Runtime& runtime, const std::function<Workspace(std::size_t bytes)>& scratch,
                                  IndexName lengths_name, const OutputNames& outputs) {
  const Check check("attention_with_kv_cache");
  check.require(o.given(), "o is missing");
  Call call =
      checked_call(check, q, k_new, v_new, k_cache, v_cache, o, lse, rotary, options, runtime, lengths_name, outputs);
  const std::size_t needed = call.rotated_bytes + call.kernel_bytes;
  Runtime with = runtime;
  with.workspace = needed > 0 ? scratch(needed) : Workspace{};
  check_workspace(check, with.workspace, needed);
  if (validates(runtime, q.device)) {
    cuda::check_indices("attention_with_kv_cache",
                        CachedIndices{{call.problem, key_names(lengths_name)},
                                      {call.append, lengths_name},
                                      {call.rotary, lengths_name, CheckStep::q_rotary}},
                        runtime.stream);
  }
  if (!call.problem.append) {
    run_step(check, step_of(check, call.append, with), call.append, with);
    if (call.rotated_bytes > 0) rotate_rows(check, call, q.shape[1], with);
  }
  with.workspace = {static_cast<std::byte*>(with.workspace.data) + call.rotated_bytes, call.kernel_bytes};
  run(check, "attention_with_kv_cache", *call.kernel, call.problem, with, call.kernel_bytes);
}

}  // namespace heddle
