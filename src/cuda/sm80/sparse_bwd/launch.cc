// How a call is cut, and where its memory lies.
#include <algorithm>

#include "cuda/any/attention_bwd_rows/launch.h"
#include "cuda/common/attention/log2.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"
#include "cuda/sm80/sparse_bwd/variants.h"

namespace heddle::cuda::sm80::sparse_bwd {
namespace {

using sparse::Arrays;

constexpr std::size_t kPartialBytes = std::size_t{3} << 29;

Params params_of(const SparseBackwardProblem& p, const Plan& plan, Arrays& arrays) {
  Params params{};
  static_cast<sparse::Index&>(params) = index_of(forward_of(p), plan, arrays);
  params.d_o = p.d_o;
  params.dq = p.dq;
  params.dk = p.dk;
  params.dv = p.dv;
  params.rows_per_head = any::attention_bwd_rows::rows_per_head(p);
  params.scale_log2 = p.scale * kLog2e;
  const auto in_pairs = [](const Operand& x) { return !x || has_rows_of_16_bytes(x); };
  params.dq_pairs = in_pairs(p.dq);
  params.key_pairs = in_pairs(p.dk) && in_pairs(p.dv);
  const std::int64_t rows = p.H * params.rows_per_head;
  params.lse_log2 = arrays.take<float>(rows);
  params.delta = arrays.take<float>(rows);
  const std::int64_t of_number = std::int64_t{plan.subs} * 2 * plan.tile_keys * plan.head;
  const bool keys = p.dk || p.dv;
  params.sums = arrays.take<float>((keys ? params.numbers() : 1) * of_number);
  params.others = arrays.take<float>((plan.pairs / plan.pairs_of_item + 1) * of_number);
  const std::int64_t partial_rows = p.dq ? plan.pairs * plan.subs * plan.rows : 0;
  params.partial = arrays.take<__half>(partial_rows * plan.head);
  params.scales = arrays.take<float>(partial_rows * (plan.head / 32));
  return params;
}

// Behind params_of(), in the same arrays. Of lists of one length there is nothing.
sparse::Csr csr_of(const Params& params, const Plan& plan, Arrays& arrays) {
  return params.problem.lists.by_offsets ? sparse::csr_of(plan, params, arrays) : sparse::Csr{};
}

}  // namespace

SparseProblem forward_of(const SparseBackwardProblem& p) {
  SparseProblem forward;
  static_cast<AttentionProblem&>(forward) = p;
  forward.lists = p.lists;
  return forward;
}

Plan plan_of(const SparseBackwardProblem& p) {
  const std::int64_t head = std::max(p.D, p.Dv) <= 64 ? 64 : 128;
  Plan plan{sparse::cut_of(forward_of(p), {.row_bytes = head * static_cast<std::int64_t>(sizeof(__half)) +
                                                        head / 32 * static_cast<std::int64_t>(sizeof(float)),
                                           .bytes = kPartialBytes,
                                           .item_rows = kItemRows,
                                           .item_pairs = kItemPairs}),
            0};
  Arrays arrays(nullptr);
  csr_of(params_of(p, plan, arrays), plan, arrays);
  plan.bytes = arrays.bytes();
  return plan;
}

void launch(const SparseBackwardProblem& p, void* memory, void* stream) {
  const Plan plan = plan_of(p);
  const auto to = static_cast<cudaStream_t>(stream);
  Arrays arrays(memory);
  const Params params = params_of(p, plan, arrays);
  const sparse::Csr csr = csr_of(params, plan, arrays);
  const any::attention_bwd_rows::Rows rows = {.lse_log2 = const_cast<float*>(params.lse_log2),
                                              .delta = const_cast<float*>(params.delta),
                                              .largest = nullptr,
                                              .sums = nullptr,
                                              .words_per_row = 0};
  if (p.B > 0 && p.H > 0) launch_rows(p, rows, to);
  if (p.dsink) launch_sink_gradient(p, rows, to);
  if (p.B == 0 || p.H == 0 || !(p.dq || p.dk || p.dv)) return;
  if (p.dk || p.dv) {
    const std::size_t of_number = sizeof(float) * 2 * plan.subs * plan.tile_keys * plan.head;
    check(cudaMemsetAsync(params.sums, 0, static_cast<std::size_t>(params.numbers()) * of_number, to), kOperation);
  }
  const Variant& v = first_that(variants(p.dtype), [&](const Variant& v) { return v.head == plan.head; });
  v.launch(params, csr, plan, to);
}

std::span<const Variant> variants(DType type) { return variants_of<Instance, kTypes, kVariants>(type); }

}  // namespace heddle::cuda::sm80::sparse_bwd
