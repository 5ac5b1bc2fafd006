// How a call is cut, where its memory lies, and the launches.
#include <algorithm>
#include <bit>

#include "cuda/common/attention/log2.h"
#include "cuda/common/device.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/requirements.h"
#include "cuda/sm80/sparse_fwd/by_rows.cuh"
#include "cuda/sm80/sparse_fwd/combine.cuh"
#include "cuda/sm80/sparse_fwd/host.h"
#include "cuda/sm80/sparse_fwd/partial.cuh"

namespace heddle::cuda::sm80::sparse_fwd {
namespace {

using sparse::Arrays;
using sparse::blocks_of;

constexpr const char* kOperation = "sparse_attention_forward";
constexpr std::size_t kPartialBytes = std::size_t{1} << 30;

// Lists of more rows are quicker by rows, which costs the same for a tile of 64 that is not full: 7 ns a tile of keys,
// where by keys a row and tile of keys takes 0.28 (an H100, 65536 positions).
constexpr std::int64_t kMostRowsByKeys = 24;
// Sequences of so few lists are steps of decoding: an index would take longer than they. Not what the whole call has,
// as a row's bits differ between the two ways, and must not depend on the other sequences.
constexpr std::int64_t kMostListsOfStep = 8;

// Sequences of a call may be of any length up to Sq.
bool goes_by_rows(const SparseProblem& p, const sparse::Cut& cut) {
  return cut.rows > kMostRowsByKeys || sparse::ceil_div(p.Sq, p.lists.query_rows) <= kMostListsOfStep;
}

std::int64_t results(const Plan& plan) { return plan.lists_at_once * plan.units * plan.parts * plan.rows; }

Params params_of(const SparseProblem& p, const Plan& plan, Arrays& arrays) {
  Params params{sparse::index_of(p, plan, arrays, !plan.by_rows)};
  params.by_rows = plan.by_rows;
  params.parts = plan.parts;
  params.row_tiles = plan.row_tiles;
  params.block_log2 = std::bit_width(static_cast<unsigned>(p.lists.block_size)) - 1;
  params.scale_log2 = p.scale * kLog2e;
  params.o_pairs = p.o.dtype != DType::f32 && has_rows_of_16_bytes(p.o);
  if (plan.by_rows && plan.parts == 1) return params;
  params.partial = arrays.take<__half>(results(plan) * plan.head);
  params.scales = arrays.take<float>(results(plan) * (plan.head / 32));
  params.lse = arrays.take<float>(results(plan));
  return params;
}

template <class C>
void launch_rows(const Params& params, cudaStream_t stream) {
  const std::int64_t ctas = params.count * params.units * params.row_tiles * params.parts;
  start(kOperation, by_rows::rows_kernel<C>,
        {static_cast<unsigned>(ctas), by_rows::kThreads, sizeof(by_rows::SharedMemory<C>)}, stream, params);
}

template <class T, int kHead>
void launch_lists(const Params& params, const Plan& plan, cudaStream_t stream) {
  if (plan.by_rows) {
    plan.share == 1 ? launch_rows<by_rows::Config<T, kHead, 1>>(params, stream)
                    : launch_rows<by_rows::Config<T, kHead, by_rows::kWarps>>(params, stream);
    if (plan.parts == 1) return;
  } else if (params.slots > 0) {
    launch_index(params, kOperation, stream);
    using C = Config<T, kHead>;
    start(kOperation, partial_kernel<C>,
          {static_cast<unsigned>(plan.item_limit * plan.subs), kThreads, sizeof(SharedMemory<C>)}, stream, params);
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
                               .item_pairs = std::max<std::int64_t>(1, kItemPositions / p.lists.query_rows)}),
            {}};
  plan.by_rows = goes_by_rows(p, plan);
  if (plan.by_rows) {
    constexpr int kTileRows = by_rows::kWarps * attention::kGroupRows;
    plan.share = plan.rows <= attention::kGroupRows ? by_rows::kWarps : 1;
    plan.row_tiles = plan.share > 1 ? 1 : static_cast<int>(sparse::ceil_div(plan.rows, kTileRows));
    plan.lists_at_once = plan.lists;
    // As many CTAs as there are multiprocessors, each with some tiles of keys.
    const std::int64_t ctas = std::max<std::int64_t>(1, plan.lists * plan.units * plan.row_tiles),
                       tiles = sparse::ceil_div(p.lists.entries * p.lists.block_size, kTileKeys);
    plan.parts = p.batch_invariant ? 1
                                   : static_cast<int>(std::clamp<std::int64_t>(
                                         current_device().multiprocessors / ctas, 1,
                                         std::max<std::int64_t>(1, sparse::ceil_div(tiles, plan.share))));
  } else {
    plan.parts = static_cast<int>(p.lists.entries) * plan.subs;
  }
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
