// How a call is cut, where its memory lies, and the launches.
#include <algorithm>

#include "cuda/any/attention_bwd_rows/launch.h"
#include "cuda/common/attention/log2.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/requirements.h"
#include "cuda/sm80/sparse_bwd/csr.cuh"
#include "cuda/sm80/sparse_bwd/finish.cuh"
#include "cuda/sm80/sparse_bwd/host.h"
#include "cuda/sm80/sparse_bwd/kernel.cuh"

namespace heddle::cuda::sm80::sparse_bwd {
namespace {

using sparse::Arrays;
using sparse::blocks_of;
using sparse::ceil_div;

constexpr const char* kOperation = "sparse_attention_backward";
constexpr std::size_t kPartialBytes = std::size_t{3} << 29;

Params params_of(const SparseBackwardProblem& p, const Plan& plan, Arrays& arrays) {
  Params params{index_of(forward_of(p), plan, arrays)};
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

template <class T, int kHead>
void launch_lists(const Params& params, const Plan& plan, cudaStream_t stream) {
  using C = Config<T, kHead>;
  if (params.slots > 0) {
    launch_index(params, kOperation, stream);
    start(kOperation, item_kernel<C>,
          {static_cast<unsigned>(plan.item_limit * plan.subs), C::kThreads, sizeof(SharedMemory<C>)}, stream, params);
    const std::int64_t floats = std::int64_t{plan.subs} * 2 * plan.tile_keys * kHead;
    if (params.dk || params.dv)
      start(kOperation, add_items_kernel, {static_cast<unsigned>(params.numbers() * kAddingBlocks), kFinishThreads},
            stream, params, floats);
  }
  if (params.dq) {
    const std::int64_t threads = params.count * params.units * params.rows * (kHead / 8);
    start(kOperation, join_dq_kernel<T, kHead>, {blocks_of(threads, kFinishThreads), kFinishThreads}, stream, params);
  }
}

// One launch, whatever the number of rounds.
template <class T, int kHead>
void launch_rounds(const Params& params, const sparse::Csr& csr, cudaStream_t stream) {
  using C = Config<T, kHead>;
  if (csr.lists == 0) return;
  launch_csr(params, csr, kOperation, stream);
  Grid grid{.blocks = 1, .threads = C::kThreads, .shared_bytes = sizeof(SharedMemory<C>), .cooperative = true};
  grid.blocks = blocks_at_once(kOperation, rounds_kernel<C>, grid);
  start(kOperation, rounds_kernel<C>, grid, stream,
        CsrParams{params, csr, any::attention_bwd_rows::round_up_to_tile(params.problem.Sq)});
}

template <class T, int kHead>
void launch_call(Params params, const sparse::Csr& csr, const Plan& plan, cudaStream_t stream) {
  const SparseProblem& p = params.problem;
  if (p.lists.by_offsets) {
    launch_rounds<T, kHead>(params, csr, stream);
  } else {
    for (params.first = 0; params.first < plan.lists; params.first += plan.lists_at_once) {
      params.count = std::min(plan.lists_at_once, plan.lists - params.first);
      launch_lists<T, kHead>(params, plan, stream);
    }
  }
  if (!params.dk && !params.dv) return;
  const std::int64_t blocks = ceil_div(p.Sk, p.lists.block_size);
  start(kOperation, finish_keys_kernel<T, kHead>,
        {static_cast<unsigned>(p.B * p.Hkv * blocks * plan.subs), kFinishThreads}, stream, params,
        static_cast<int>(blocks));
}

template <class T>
void launch_call(const Params& params, const sparse::Csr& csr, const Plan& plan, cudaStream_t stream) {
  plan.head == 64 ? launch_call<T, 64>(params, csr, plan, stream) : launch_call<T, 128>(params, csr, plan, stream);
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
  p.dtype == DType::f16 ? launch_call<__half>(params, csr, plan, to)
                        : launch_call<__nv_bfloat16>(params, csr, plan, to);
}

}  // namespace heddle::cuda::sm80::sparse_bwd
