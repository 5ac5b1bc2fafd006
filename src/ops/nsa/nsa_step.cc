// nsa_step: check, ask each candidate, choose, launch.
#include <cmath>
#include <limits>
#include <vector>

#include "ops/attention/arguments.h"
#include "ops/attention/problem_builder.h"
#include "ops/nsa/choice.h"
#include "ops/nsa/nsa.h"
#include "ops/sparse/sparse.h"
#include "ops/validate.h"
#include "problem/operand_of.h"

namespace heddle {
namespace {

class StepChecks {
 public:
  StepChecks(const Check& check, const TensorView& q) : check_(check), q_(q) {}

  void first() const {
    check_.require(q_.given(), "q is missing");
    check_.require(q_.dtype == DType::f16 || q_.dtype == DType::bf16, "q is ", name_of(q_.dtype),
                   ": a step takes float16 or bfloat16");
    check_.require(q_.rank == 4, "q has ", q_.rank, " dimensions: it must be [B, 1, H, D]; found q ", q_);
    check_.addressable(q_, "q");
    check_.require(q_.shape[1] == 1, "q is ", q_, ": a step has one row of each sequence");
    check_.require(q_.shape[2] >= 1 && q_.shape[3] >= 1, "q is ", q_,
                   ": it must have at least one head and one dimension");
  }
  // Of q's dtype, [batches, rows, heads, size]; -1: any.
  Operand rows(const TensorView& view, const char* name, std::int64_t batches, std::int64_t rows, std::int64_t heads,
               std::int64_t size) const {
    check_.tensor(view, name, q_.dtype, q_.device, 4);
    const std::int64_t wanted[] = {batches, rows, heads, size};
    const char* const letters[] = {batches == q_.shape[0] ? "B" : "pages", "rows", "Hkv", "head size"};
    for (int n = 0; n < 4; ++n) {
      if (wanted[n] < 0) continue;
      check_.require(view.shape[n] == wanted[n], name, " is ", view, ": its ", letters[n], " must be ", wanted[n]);
    }
    return operand_of(view);
  }
  Operand written(const TensorView& view, const char* name, std::int64_t batches, std::int64_t rows, std::int64_t heads,
                  std::int64_t size) const {
    const Operand x = this->rows(view, name, batches, rows, heads, size);
    check_.not_overlapping(view, name);
    return x;
  }
  Plane gate(const TensorView& view, const char* name) const {
    check_.require(view.dtype == DType::f32 || view.dtype == DType::f16 || view.dtype == DType::bf16, name, " is ",
                   name_of(view.dtype), ": it must be float32, float16 or bfloat16");
    check_.tensor(view, name, view.dtype, q_.device, 3);
    check_.require(view.shape[0] == q_.shape[0] && view.shape[1] == 1 && view.shape[2] == q_.shape[2], name, " is ",
                   view, ": it must be [", q_.shape[0], ", 1, ", q_.shape[2], "], a number for each head of q");
    Plane plane = plane_of(view);
    plane.stride_b = view.stride[0];
    plane.stride_i = view.stride[1];
    plane.stride_h = view.stride[2];
    return plane;
  }

 private:
  const Check& check_;
  const TensorView& q_;
};

void check_options(const Check& check, NsaStepProblem& p, const NsaStepOptions& options) {
  p.block = options.block_size;
  check_block_size(check, p.block);
  p.slots = options.block_count;
  check.require(p.slots >= 0, "block_count is ", p.slots, ": it must be at least 0");
  p.window = options.window;
  check.require(p.window >= 0, "window is ", p.window, ": it must be at least 0");
  const float scale = options.scale.value_or(static_cast<float>(1 / std::sqrt(static_cast<double>(p.D))));
  check.require(std::isfinite(scale), "scale is ", static_cast<double>(scale), ": it must be finite");
  p.scale = scale;
  p.forced = options.forced;
  p.batch_invariant = options.batch_invariant;
}

void fill_pages(const Check& check, NsaStepProblem& p, const NsaCache& cache) {
  const TensorView& table = cache.page_table;
  check.tensor(table, "cache.page_table", DType::i32, p.device, 2);
  check.require(table.shape[0] == p.B, "cache.page_table is ", table, ": it must have one row for each of ", p.B,
                " sequences");
  check.require(table.stride[1] == 1 || table.shape[1] <= 1, "cache.page_table's rows must be contiguous");
  p.pages = cache.k.shape[0];
  p.page_size = cache.k.shape[1];
  check.require(p.page_size >= 1 && p.page_size % p.block == 0, "cache.k has pages of ", p.page_size,
                " keys: it must be a multiple of block_size, ", p.block);
  check.require(p.pages >= 1 || table.elements() == 0, "cache.k is ", cache.k,
                ": cache.page_table names pages and there is none");
  check.require(table.shape[1] <= std::numeric_limits<std::int32_t>::max() / p.page_size, "cache.page_table has ",
                table.shape[1], " pages of ", p.page_size, " keys for a sequence: it must have fewer than 2^31 keys");
  p.capacity = table.shape[1] * p.page_size;
  p.page_table = static_cast<const std::int32_t*>(table.data);
  p.page_table_stride = table.stride[0];
}

void check_indices(const NsaStepProblem& p, const Runtime& runtime) {
  if (!validates(runtime, p.device)) return;
  AppendProblem rows;  // as lengths concern it
  rows.B = p.B;
  rows.S = 1;
  rows.capacity = p.capacity;
  rows.pages = p.B;
  rows.seqlens = p.lengths;
  if (p.page_table != nullptr) {
    rows.pages = p.pages;
    rows.page_table = p.page_table;
    rows.page_table_stride = p.page_table_stride;
    rows.page_size = p.page_size;
  }
  cuda::check_indices("nsa_step", AppendIndices{rows, IndexName::lengths}, runtime.stream);
}

}  // namespace

NsaStepProblem checked_nsa_step_problem(const Check& check, const TensorView& q, const TensorView& k_new,
                                        const TensorView& v_new, const NsaCache& cache, const NsaGates& gates,
                                        const TensorView& out, const NsaStepOptions& options) {
  const StepChecks checks(check, q);
  checks.first();
  NsaStepProblem p;
  p.dtype = q.dtype;
  p.device = q.device;
  p.B = q.shape[0];
  p.D = q.shape[3];
  p.q = operand_of(q);
  check_options(check, p, options);

  p.k_new = checks.rows(k_new, "k_new", p.B, 1, -1, p.D);
  p.H = k_new.shape[2];
  check.require(p.H >= 1 && q.shape[2] % p.H == 0, "q has ", q.shape[2], " heads and k_new ", p.H,
                ": the former must be a multiple of the latter");
  p.G = q.shape[2] / p.H;
  p.v_new = checks.rows(v_new, "v_new", p.B, 1, p.H, -1);
  p.Dv = v_new.shape[3];
  check.require(p.Dv >= 1, "v_new is ", v_new, ": it must have at least one dimension");
  const bool paged = cache.page_table.given();
  p.k = checks.written(cache.k, "cache.k", paged ? -1 : p.B, -1, p.H, p.D);
  const std::int64_t batches = cache.k.shape[0], rows = cache.k.shape[1];
  p.capacity = rows;
  if (paged) fill_pages(check, p, cache);
  check.require(p.capacity <= std::numeric_limits<std::int32_t>::max(), "cache.k has ", p.capacity,
                " rows: lengths must be below 2^31");
  p.v = checks.written(cache.v, "cache.v", batches, rows, p.H, p.Dv);
  p.pooled = p.capacity / p.block;
  p.k_pooled = checks.written(cache.k_pooled, "cache.k_pooled", batches, rows / p.block, p.H, p.D);
  p.v_pooled = checks.written(cache.v_pooled, "cache.v_pooled", batches, rows / p.block, p.H, p.Dv);
  check.tensor(cache.lengths, "cache.lengths", DType::i32, p.device, 1);
  check.require(cache.lengths.shape[0] == p.B, "cache.lengths has ", cache.lengths.shape[0], " entries: it must have ",
                p.B);
  check.require(cache.lengths.stride[0] == 1 || p.B <= 1, "cache.lengths must be contiguous");
  p.lengths = static_cast<const std::int32_t*>(cache.lengths.data);
  p.out = checks.written(out, "out", p.B, 1, q.shape[2], p.Dv);

  check.require(gates.slc.given(), "g_slc is missing");
  p.g_slc = checks.gate(gates.slc, "g_slc");
  if (gates.cmp.given()) p.g_cmp = checks.gate(gates.cmp, "g_cmp");
  check.require(gates.swa.given() || p.window == 0, "g_swa is missing: window is ", p.window);
  if (gates.swa.given()) p.g_swa = checks.gate(gates.swa, "g_swa");

  const Named outputs[] = {{"out", &out},
                           {"cache.k", &cache.k},
                           {"cache.v", &cache.v},
                           {"cache.k_pooled", &cache.k_pooled},
                           {"cache.v_pooled", &cache.v_pooled}};
  const Named inputs[] = {{"q", &q},
                          {"k_new", &k_new},
                          {"v_new", &v_new},
                          {"g_cmp", &gates.cmp},
                          {"g_slc", &gates.slc},
                          {"g_swa", &gates.swa},
                          {"cache.lengths", &cache.lengths},
                          {"cache.page_table", &cache.page_table}};
  check_apart(check, outputs, inputs);
  return p;
}

void nsa_step(const TensorView& q, const TensorView& k_new, const TensorView& v_new, const NsaCache& cache,
              const NsaGates& gates, const TensorView& out, const NsaStepOptions& options, const Runtime& runtime) {
  nsa_step_with(q, k_new, v_new, cache, gates, out, options, runtime, [&](std::size_t) { return runtime.workspace; });
}

std::size_t nsa_step_workspace(const TensorView& q, const TensorView& k_new, const TensorView& v_new,
                               const NsaCache& cache, const NsaGates& gates, const TensorView& out,
                               const NsaStepOptions& options, const Runtime& runtime) {
  const Check check("nsa_step", Data::to_come);
  const NsaStepProblem p = checked_nsa_step_problem(check, q, k_new, v_new, cache, gates, out, options);
  const int workers = workers_of(runtime);
  return choose(check, p, wish_of<NsaStepProblem>(check, options.force), workers).workspace(p, workers);
}

void nsa_step_with(const TensorView& q, const TensorView& k_new, const TensorView& v_new, const NsaCache& cache,
                   const NsaGates& gates, const TensorView& out, const NsaStepOptions& options, const Runtime& runtime,
                   const std::function<Workspace(std::size_t bytes)>& scratch) {
  const Check check("nsa_step");
  const NsaStepProblem p = checked_nsa_step_problem(check, q, k_new, v_new, cache, gates, out, options);
  const int workers = workers_of(runtime);
  const NsaStepKernel& kernel = choose(check, p, wish_of<NsaStepProblem>(check, options.force), workers);
  if (p.B == 0) return;
  const std::size_t needed = kernel.workspace(p, workers);
  Runtime with = runtime;
  with.workspace = needed > 0 ? scratch(needed) : Workspace{};
  check_indices(p, runtime);
  run(check, "nsa_step", kernel, p, with, needed);
}

std::vector<Candidate> explain_nsa_step(const TensorView& q, const TensorView& k_new, const TensorView& v_new,
                                        const NsaCache& cache, const NsaGates& gates, const TensorView& out,
                                        const NsaStepOptions& options, const Runtime& runtime) {
  const Check check("explain_nsa_step", Data::to_come);
  return explained(checked_nsa_step_problem(check, q, k_new, v_new, cache, gates, out, options),
                   wish_of<NsaStepProblem>(check, options.force), workers_of(runtime));
}

}  // namespace heddle
