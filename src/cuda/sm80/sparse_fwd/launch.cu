// How a call is cut, where its memory lies, and the launches.
#include <algorithm>

#include "cuda/common/attention/log2.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/requirements.h"
#include "cuda/sm80/sparse_fwd/combine.cuh"
#include "cuda/sm80/sparse_fwd/host.h"
#include "cuda/sm80/sparse_fwd/partial.cuh"

namespace heddle::cuda::sm80::sparse_fwd {
namespace {

using sparse::Arrays;
using sparse::blocks_of;

constexpr const char* kOperation = "sparse_attention_forward";
// So few tiles are done in the time that an index would take, as in a step of decoding.
constexpr std::int64_t kMostDirect = 4096;
constexpr std::size_t kPartialBytes = std::size_t{1} << 30;

Params params_of(const SparseProblem& p, const Plan& plan, Arrays& arrays) {
  Params params{sparse::index_of(p, plan, arrays, !plan.direct)};
  params.direct = plan.direct;
  params.scale_log2 = p.scale * kLog2e;
  params.o_pairs = p.o.dtype != DType::f32 && has_rows_of_16_bytes(p.o);
  const std::int64_t rows = plan.pairs * plan.subs * plan.rows;
  params.partial = arrays.take<__half>(rows * plan.head);
  params.scales = arrays.take<float>(rows * (plan.head / 32));
  params.lse = arrays.take<float>(rows);
  return params;
}

template <class T, int kHead>
void launch_lists(const Params& params, const Plan& plan, cudaStream_t stream) {
  if (params.slots > 0) {
    if (!plan.direct) launch_index(params, kOperation, stream);
    using C = Config<T, kHead>;
    const std::int64_t items = plan.direct ? plan.pairs : plan.item_limit;
    start(kOperation, partial_kernel<C>, {static_cast<unsigned>(items * plan.subs), kThreads, sizeof(SharedMemory<C>)},
          stream, params);
  }
  const std::int64_t threads = params.count * params.units * params.rows * (kHead / 8);
  start(kOperation, combine_kernel<T, kHead>, {blocks_of(threads, kCombineThreads), kCombineThreads}, stream, params);
}

template <class T>
void launch_lists(const Params& params, const Plan& plan, cudaStream_t stream) {
  plan.head == 64 ? launch_lists<T, 64>(params, plan, stream) : launch_lists<T, 128>(params, plan, stream);
}

}  // namespace

Plan plan_of(const SparseProblem& p) {
  const std::int64_t head = std::max(p.D, p.Dv) <= 64 ? 64 : 128;
  constexpr std::int64_t kFloat = sizeof(float);
  Plan plan{sparse::cut_of(p, {.row_bytes = head * static_cast<std::int64_t>(sizeof(__half)) + (head / 32 + 1) * kFloat,
                               .bytes = kPartialBytes,
                               .item_rows = kItemRows,
                               .item_pairs = kItemPairs}),
            false, 0};
  plan.direct = plan.lists_at_once == plan.lists && plan.pairs * plan.subs <= kMostDirect;
  Arrays arrays(nullptr);
  params_of(p, plan, arrays);
  plan.bytes = arrays.bytes();
  return plan;
}

void launch(const SparseProblem& p, void* memory, void* stream) {
  const Plan plan = plan_of(p);
  if (plan.lists == 0 || p.H == 0) return;
  Arrays arrays(memory);
  Params params = params_of(p, plan, arrays);
  for (params.first = 0; params.first < plan.lists; params.first += plan.lists_at_once) {
    params.count = std::min(plan.lists_at_once, plan.lists - params.first);
    const auto to = static_cast<cudaStream_t>(stream);
    p.dtype == DType::f16 ? launch_lists<__half>(params, plan, to) : launch_lists<__nv_bfloat16>(params, plan, to);
  }
}

}  // namespace heddle::cuda::sm80::sparse_fwd
