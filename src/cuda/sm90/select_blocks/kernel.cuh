// Scores of blocks and the best of them on Hopper. One CTA a multiprocessor takes items, some neighbouring positions of
// a kv head each: in the first warpgroup a warp says what they are and a thread brings pooled keys, the others compute.
// docs/kernels/sm90_select_blocks.md
#pragma once

#include "cuda/common/ptx/tma.cuh"
#include "cuda/sm90/select_blocks/consumer.cuh"

namespace heddle::cuda::sm90::select_blocks {

constexpr int kRegisters = 232, kProducerRegisters = 40;
constexpr int kRegistersAtStart = 65536 / kThreads / 8 * 8;
static_assert(kConsumers * kRegisters + kProducerRegisters <= (1 + kConsumers) * kRegistersAtStart);

// Announces the CTA's items, in turn with the other CTAs, and then that there are no more. One warp, of few registers:
// what an item is made of is in shared memory from the start.
template <class C>
__device__ __forceinline__ void announce(const Params& p, SharedMemory<C>& shared) {
  const SelectProblem& problem = p.problem;
  const int lane = lane_of_thread();
  RingPosition<kWorkSlots> slot;
  int n = static_cast<int>(blockIdx.x);
#pragma unroll 1
  for (bool more = true; more; slot.next()) {
    ptx::barrier_wait(shared.work_free[slot.index], slot.phase ^ 1);
    Work& w = shared.work[slot.index];
    const sparse::Place& at = w.at;
    more = false;
#pragma unroll 1
    for (; n < p.items && !more; n += static_cast<int>(gridDim.x)) {
      if (lane == 0) {
        w.kv_head = n / p.tiles;  // its items follow each other: pooled keys stay in the L2 cache
        // The last positions first: they see most.
        w.at = sparse::place_of_tile(problem, p.tiles - 1 - n % p.tiles, C::kCut.of_cta());
        w.count = w.at.there ? static_cast<int>(clamped(w.at.s.q_rows - w.at.row, 0, C::kCut.of_cta())) : 0;
      }
      __syncwarp();
      more = w.count > 0;
      __syncwarp();
    }
    if (!more) {
      if (lane == 0) w.tiles = 0;
    } else {
#pragma unroll 1
      for (int position = lane; position < w.count; position += kWarp) {
        sparse::find_listing(problem, at.s, at.row + position, w.positions[position]);
      }
      __syncwarp();
      if (lane == 0) {
        const std::int64_t row = at.s.q_begin + at.row, head = w.kv_head * problem.G;
        w.q = problem.q.at(at.b, row, head);
        w.lse = reinterpret_cast<const float*>(problem.lse.data) + problem.lse.offset(at.b, head, row);
        w.list = problem.list(at.b, at.s, at.row, w.kv_head);
        // The last position sees most. Where nothing is seen there is a tile all the same, and so one kind of item.
        w.tiles = max(1, (w.positions[w.count - 1].seen + kTileKeys - 1) / kTileKeys);
      }
    }
    __syncwarp();
    ptx::barrier_arrive(shared.work_ready[slot.index]);
  }
}

// Brings pooled keys. One thread.
template <class C>
__device__ __forceinline__ void produce(const Params& p, SharedMemory<C>& shared) {
  using Keys = typename SharedMemory<C>::Keys;
  constexpr int kPanels = Keys::kChunks / Keys::kPanelChunks, kPanelColumns = Keys::kPanelChunks * Keys::kPerChunk;
  RingPosition<C::kStages> stage;
  for (RingPosition<kWorkSlots> slot;; slot.next()) {
    await_filled(shared.work_ready[slot.index], slot.phase);
    const Work& w = shared.work[slot.index];
    const int tiles = w.tiles, key = static_cast<int>(w.at.s.k_begin), kv_head = w.kv_head,
              batch = p.problem.cu_seqlens_k.given ? 0 : static_cast<int>(w.at.b);
    ptx::barrier_arrive(shared.work_free[slot.index]);
    if (tiles == 0) return;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, stage.next()) {
      auto& ready = shared.ready[stage.index];
      await_free(shared.free[stage.index], stage.phase);
      ptx::barrier_arrive_expect(ready, sizeof(Keys));
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        ptx::tma_load_4d(shared.k[stage.index].panel[panel], p.k, ready, panel * kPanelColumns, key + tile * kTileKeys,
                         kv_head, batch, ptx::L2::evict_normal);
      }
    }
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, 1) select_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  // Through a shuffle, so that the compiler knows it to be uniform.
  const int warp = __shfl_sync(kAll, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(p.k);
    for (int n = 0; n < C::kStages; ++n) {
      ptx::barrier_init(shared.ready[n], 1);
      ptx::barrier_init(shared.free[n], kConsumerWarps);
    }
    for (int n = 0; n < kWorkSlots; ++n) {
      ptx::barrier_init(shared.work_ready[n], kWarp);
      ptx::barrier_init(shared.work_free[n], kConsumers * kWarpgroup + 1);  // and the thread that brings keys
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();
  if (warp < kWarpgroup / kWarp) {
    ptx::registers_decrease<kProducerRegisters>();
    if (threadIdx.x == 0) {
      produce(p, shared);
    } else if (warp == 1) {
      announce(p, shared);
    }
  } else {
    ptx::registers_increase<kRegisters>();
    Consumer<C>(p, shared).run();
  }
}

}  // namespace heddle::cuda::sm90::select_blocks
