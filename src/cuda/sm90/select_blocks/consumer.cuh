// A warpgroup that has 64 rows of q of each item: scores of pooled keys, sums over heads, lists.
//
// While scores of a tile are summed, the next tile's product runs, into registers of its own. That goes on over items:
// the next item's q is taken as soon as the last product with this one's is done.
#pragma once

#include "cuda/common/attention/log2.h"
#include "cuda/common/hand_over.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/recomputed.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/select_blocks/lists.cuh"

namespace heddle::cuda::sm90::select_blocks {

template <class C>
class Consumer {
 public:
  __device__ Consumer(const Params& params, SharedMemory<C>& memory)
      : p(params), shared(memory), lists(params, memory) {}

  __device__ __forceinline__ void run() {
    if (!await_work()) return;
    load_rows();
    take_rows();
    float even[kTileKeys / 2], odd[kTileKeys / 2];
    multiply(even);
    begin_item();
    for (;;) {
      if (!use_tile(even, odd)) {
        take_tile(even);
        break;
      }
      if (!use_tile(odd, even)) {
        take_tile(odd);
        break;
      }
    }
    end_item();
  }

 private:
  using T = typename C::Element;
  using Keys = typename SharedMemory<C>::Keys;
  using Rows = typename SharedMemory<C>::Rows;
  using Product = Wgmma<T, kTileKeys>;
  static constexpr Cut kCut = C::kCut;
  using Scores = float[kTileKeys / 2];

  // Waits until the item at `coming` is announced. False if there is none.
  __device__ __forceinline__ bool await_work() {
    await_filled(shared.work_ready[coming.index], coming.phase);
    return shared.work[coming.index].tiles > 0;
  }

  // Brings the warp's rows of the item at `coming`, zeros for those that are not there. Its rows of the item before
  // are in registers.
  __device__ __forceinline__ void load_rows() {
    constexpr int kPass = kWarp / Rows::kChunks;
    const Work& w = shared.work[coming.index];
    // Not kept in registers from item to item.
    const int thread = recomputed(static_cast<int>(threadIdx.x) - kWarpgroup), lane = thread % kWarp,
              warp = thread / kWarp, chunk = lane % Rows::kChunks;
    const bool pairs = kCut.halvings > 0 || p.problem.G > 1, column = chunk * Rows::kPerChunk < p.problem.D;
    const auto position = [&](int low) { return warp * kCut.of_warp() + (low >> kCut.halvings); };
    const auto head = [&](int low) { return low & ((1 << kCut.halvings) - 1); };
    const std::uint32_t to = ptx::shared_address(&shared.q[warp]);
#pragma unroll
    for (int n = 0; n < kWarpRows / 2; n += kPass) {
      const int low = n + lane / Rows::kChunks;
      const std::byte* const from = w.q + position(low) * p.q_row + head(low) * p.q_head + 16 * chunk;
      const bool exists = column && position(low) < w.count;
      ptx::copy_async_16(to + Rows::offset(low, chunk), exists ? from : p.problem.q.data, exists);
      ptx::copy_async_16(to + Rows::offset(low + kWarpRows / 2, chunk),
                         exists && pairs ? from + p.q_half : p.problem.q.data, exists && pairs);
    }
    if (lane < kWarpRows) {
      const int low = lane % (kWarpRows / 2), high = lane / (kWarpRows / 2);
      const bool exists = position(low) < w.count && (high == 0 || pairs);
      const float* const from = w.lse + position(low) * p.problem.lse.stride_i +
                                (head(low) + (high << kCut.halvings)) * p.problem.lse.stride_h;
      ptx::copy_async_4(ptx::shared_address(&shared.lse[warp][lane]),
                        exists ? static_cast<const void*>(from) : p.problem.lse.data, exists);
    }
    ptx::copy_async_commit();
  }

  __device__ __forceinline__ void take_rows() {
    ptx::copy_async_wait<0>();
    __syncwarp();
    const int lane = lane_of_thread();
    const std::uint32_t from = ptx::shared_address(&shared.q[consumer_warp()]) + Rows::offset(lane % 16, lane / 16);
#pragma unroll
    for (int n = 0; n < C::kHeadSize / 16; ++n) {
      ptx::load_matrix_x4(q[n], (from ^ n % 4 << 5) + n / 4 * Rows::kPanelBytes);
    }
  }

  // The item at `coming`, whose rows have been taken, is at hand; rows of the next are on their way.
  __device__ __forceinline__ void begin_item() {
    at_hand = coming.index;
    const Work& w = shared.work[at_hand];
    tile = 0;
    tiles = __shfl_sync(kAll, w.tiles, 0);
    const int lane = lane_of_thread();
#pragma unroll
    for (int r = 0; r < 2; ++r) lse[r] = shared.lse[consumer_warp()][lane / 4 + 8 * r] * kLog2e;
    lists.begin(w);
    coming.next();
    __syncwarp();  // all have read lse, and their rows
    more = __shfl_sync(kAll, static_cast<int>(await_work()), 0) != 0;
    if (more) load_rows();
  }

  // Begins the product with the next tile of pooled keys.
  __device__ __forceinline__ void multiply(Scores& s) {
    await_filled(shared.ready[stage.index], stage.phase);
    const Swizzled128 keys(shared.k[stage.index].panel);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < C::kHeadSize / 16; ++n) {
      Product::template registers_shared<false>(s, q[n], keys.at(n / 4 * Keys::kPanelBytes + n % 4 * 32), n > 0);
    }
    wgmma_commit();
    stage.next();
  }

  // Lists take the tile at hand, whose product is `here`, while that of the next one is made in `there`. Where there is
  // none: false, and the product at hand is there to be taken.
  __device__ __forceinline__ bool use_tile(Scores& here, Scores& there) {
    const bool last = tile + 1 == tiles;
    if (last) {
      wgmma_wait<0>();  // with the rows that are in registers
      if (!more) return false;
      take_rows();
    }
    multiply(there);
    wgmma_wait<1>();
    take_tile(here);
    ++tile;
    if (last) {
      end_item();
      begin_item();
    }
    return true;
  }

  __device__ __forceinline__ void take_tile(Scores& s) {
    keep(s);
    release_after_products(shared.free[used]);
    used = used + 1 == C::kStages ? 0 : used + 1;
    Sums x;
    sum_heads(s, x);
    lists.take(shared.work[at_hand], x, tile * kTileKeys);
  }

  __device__ __forceinline__ void end_item() {
    lists.finish(shared.work[at_hand]);
    ptx::barrier_arrive(shared.work_free[at_hand]);  // every thread has read it by loads, and stores fill it
  }

  // Probabilities, and their sums over the heads of a position. The additions of each column are those of every other,
  // so that equal pooled keys have equal sums. Columns behind what a position sees have sums too, which no list takes.
  __device__ __forceinline__ void sum_heads(const Scores& s, Sums& x) {
    const auto probability = [&](int column, int r) {
      return ptx::exp2_approx(fmaf(s[column / 2 * 4 + 2 * r + column % 2], p.scale_log2, -lse[r]));
    };
    if (kCut.halvings > 0 || p.problem.G > 1) {
#pragma unroll
      for (int i = 0; i < 32; ++i) x[i] = probability(i, 0) + probability(i, 1);
    } else {
#pragma unroll
      for (int i = 0; i < 32; ++i) x[i] = probability(i, 0);
    }
    if constexpr (kCut.halvings > 0) halve<0>(x);
    if constexpr (kCut.halvings > 1) halve<1>(x);
    if constexpr (kCut.halvings > 2) halve<2>(x);
  }
  // Of the values of two lanes each has the half that is its own, summed.
  template <int kTimes>
  __device__ __forceinline__ void halve(Sums& x) {
    constexpr int kHalf = 16 >> kTimes, kOther = 4 << kTimes;
    const bool upper = (lane_of_thread() & kOther) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float gives = upper ? x[i] : x[i + kHalf], keeps = upper ? x[i + kHalf] : x[i];
      x[i] = keeps + __shfl_xor_sync(kAll, gives, kOther);
    }
  }

  const Params& p;
  SharedMemory<C>& shared;
  Lists<C> lists;
  std::uint32_t q[C::kHeadSize / 16][4];
  float lse[2];  // of the lane's rows, in log2 units
  RingPosition<C::kStages> stage;
  int used = 0;  // the stage of the oldest product that has not been waited for
  RingPosition<kWorkSlots> coming;
  int at_hand, tile, tiles;
  bool more;  // there is an item behind the one at hand
};

}  // namespace heddle::cuda::sm90::select_blocks
