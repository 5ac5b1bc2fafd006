// How a call is cut, where its memory lies, and the launches.
#include <algorithm>

#include "cuda/common/attention/log2.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/requirements.h"
#include "cuda/sm80/sparse_fwd/combine.cuh"
#include "cuda/sm80/sparse_fwd/host.h"
#include "cuda/sm80/sparse_fwd/index.cuh"
#include "cuda/sm80/sparse_fwd/partial.cuh"

namespace heddle::cuda::sm80::sparse_fwd {
namespace {

constexpr const char* kOperation = "sparse_attention_forward";

std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }

// Arrays one behind the other, each from a multiple of 256 bytes on. Without memory it counts.
class Arrays {
 public:
  explicit Arrays(void* memory) : memory_(static_cast<std::byte*>(memory)) {}

  template <class T>
  T* take(std::int64_t count) {
    const std::size_t at = bytes_;
    bytes_ += (static_cast<std::size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + at);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* memory_;
  std::size_t bytes_ = 0;
};

void place(Params& params, const Plan& plan, Arrays& arrays) {
  const std::int64_t numbers = plan.units * plan.blocks, pairs = plan.lists_at_once * plan.units * params.slots;
  params.counts = arrays.take<int>(numbers);
  params.begins = arrays.take<int>(numbers);
  params.item_begins = arrays.take<int>(numbers);
  params.items_there = arrays.take<int>(1);
  params.block_of = arrays.take<int>(pairs);
  params.place_of = arrays.take<int>(pairs);
  params.named = arrays.take<Named>(pairs);
  params.items = arrays.take<Item>(plan.item_limit);
  params.statistics = arrays.take<Statistics>(pairs * plan.rows);
  params.partial = arrays.take<__half>(pairs * plan.rows * plan.head);
}

unsigned blocks_of(std::int64_t threads, std::int64_t of_block) {
  return static_cast<unsigned>(ceil_div(threads, of_block));
}

template <class T, int kHead>
void launch_lists(const Params& params, const Plan& plan, cudaStream_t stream) {
  const std::int64_t pairs = params.count * params.units * params.slots;
  if (pairs > 0) {
    check(cudaMemsetAsync(params.counts, 0, static_cast<std::size_t>(plan.units * plan.blocks) * sizeof(int), stream),
          kOperation);
    start(kOperation, count_kernel, {blocks_of(params.count * params.units * kWarp, kIndexThreads), kIndexThreads},
          stream, params);
    start(kOperation, scan_kernel, {1, kScanThreads}, stream, params);
    start(kOperation, order_kernel, {blocks_of(pairs, kIndexThreads), kIndexThreads}, stream, params);
    start(kOperation, partial_kernel<T, kHead>,
          {static_cast<unsigned>(plan.item_limit), kThreads, sizeof(SharedMemory<T, kHead>)}, stream, params);
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
  Plan plan{};
  plan.group = p.lists.units == p.Hkv || p.lists.units == 1 ? p.G : 1;
  plan.units = p.H / plan.group;
  plan.rows = plan.group * p.lists.query_rows;
  const std::int64_t share = p.lists.query_rows, size = p.lists.block_size;
  plan.lists = !p.cu_seqlens_q ? p.B * ceil_div(p.Sq, share) : share == 1 ? p.q_rows : p.q_rows / share + p.B;
  plan.blocks = p.cu_seqlens_k ? p.k_rows / size + p.B + 1 : p.B * ceil_div(p.Sk, size);
  plan.head = std::max(p.D, p.Dv) <= 64 ? 64 : 128;
  const std::int64_t slots = p.lists.entries;
  const std::int64_t bytes_of_list =
      plan.units * std::max<std::int64_t>(slots, 1) *
      (plan.rows * static_cast<std::int64_t>(plan.head * sizeof(__half) + sizeof(Statistics)) + 16);
  plan.lists_at_once = std::clamp<std::int64_t>(static_cast<std::int64_t>(kPartialBytes) / bytes_of_list, 1,
                                                std::max<std::int64_t>(plan.lists, 1));
  plan.pairs_of_item = std::max<std::int64_t>(1, kItemRows / plan.rows);
  const std::int64_t pairs = plan.lists_at_once * plan.units * slots;
  // Each block may have one item that is not full.
  plan.item_limit = pairs / plan.pairs_of_item + std::min(pairs, plan.units * plan.blocks);
  Params params{};
  params.slots = static_cast<int>(slots);
  Arrays arrays(nullptr);
  place(params, plan, arrays);
  plan.bytes = arrays.bytes();
  return plan;
}

void launch(const SparseProblem& p, void* memory, void* stream) {
  const Plan plan = plan_of(p);
  if (plan.lists == 0 || p.H == 0) return;
  Params params{};
  params.problem = p;
  params.units = static_cast<int>(plan.units);
  params.group = static_cast<int>(plan.group);
  params.rows = static_cast<int>(plan.rows);
  params.slots = static_cast<int>(p.lists.entries);
  params.pairs_of_item = static_cast<int>(plan.pairs_of_item);
  params.blocks = plan.blocks;
  params.scale_log2 = p.scale * kLog2e;
  params.o_pairs = p.o.dtype != DType::f32 && has_rows_of_16_bytes(p.o);
  Arrays arrays(memory);
  place(params, plan, arrays);
  for (params.first = 0; params.first < plan.lists; params.first += plan.lists_at_once) {
    params.count = std::min(plan.lists_at_once, plan.lists - params.first);
    const auto to = static_cast<cudaStream_t>(stream);
    p.dtype == DType::f16 ? launch_lists<__half>(params, plan, to) : launch_lists<__nv_bfloat16>(params, plan, to);
  }
}

}  // namespace heddle::cuda::sm80::sparse_fwd
