// The warps that turn V over: wgmma takes 8-bit operands only with the summed index, here the keys, running fastest.
//
// Two orders change on the way, both so that no byte ever moves between lanes. In each 16 keys, V^T's column
// 4 q + 2 a + c holds key 8 a + 2 q + c: the accumulators of S = Q K^T, packed as they lie, then are the A operand of
// P V. In each 16 dims, its row 8 a + n holds dim 2 n + a: the epilogue finds four neighbours in a thread.
#pragma once

#include "cuda/common/hand_over.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/attention/guard.cuh"
#include "cuda/sm90/attention_fwd_fp8/token_scales.cuh"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

// 32 keys from `key` on, all dims. The whole warp.
template <class C>
__device__ void transpose(const Tile<C::kTileK>& v, Tile<C::kValueSize + 8>& transposed, int key) {
  const std::uint32_t lane = threadIdx.x % 32;
  // 16-byte chunk c of row r lies at chunk c ^ (r % 8).
  const std::uint32_t from = ptx::shared_address(&v) + (key + lane) * kRowBytes + lane % 8 * 16;
  const std::uint32_t row = lane % 16, chunk = (key / 16 + lane / 16) ^ (row % 8);
  const std::uint32_t to = ptx::shared_address(&transposed) + row * kRowBytes + chunk * 16;
  constexpr int kBlocks = C::kValueSize / 16, kBatch = 2;
#pragma unroll 1
  for (int first = 0; first < kBlocks; first += kBatch) {
    // r[][i]: dims 2 n, 2 n + 1 of key 8 i + 2 q, then of key 8 i + 2 q + 1; n = lane / 4, q = lane % 4.
    std::uint32_t r[kBatch][4];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) ptx::load_matrix_x4_transposed(r[n], from ^ (first + n) * 16);
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      ptx::store_matrix_x4(to + (first + n) * 16 * kRowBytes, __byte_perm(r[n][0], r[n][1], 0x6420),
                           __byte_perm(r[n][0], r[n][1], 0x7531), __byte_perm(r[n][2], r[n][3], 0x6420),
                           __byte_perm(r[n][2], r[n][3], 0x7531));
    }
  }
}

// The last 8 rows of V^T are ones: their products are the row sums of P as rounded. The swizzle leaves them as they
// are.
template <class C>
__device__ void write_ones(SharedMemory<C>& shared, int number) {
  constexpr std::uint32_t kOnes = 0x38383838;
#pragma unroll 1
  for (int stage = 0; stage < C::kStages; ++stage) {
    auto* const rows = reinterpret_cast<uint4*>(shared.transposed[stage].panel[0][C::kValueSize]);
    rows[32 * number + threadIdx.x % 32] = make_uint4(kOnes, kOnes, kOnes, kOnes);
  }
}

// One of the transposing warps: it has a share of each tile's keys.
template <class C>
__device__ void transpose_values(const Params& p, SharedMemory<C>& shared, int number) {
  constexpr int kShare = C::kTileK / C::kTransposers;
  const bool first_lane = threadIdx.x % 32 == 0;
  write_ones<C>(shared, number);
  RingPosition<C::kStages> v;
  for (RingPosition<kWorkSlots> slot;; slot.next()) {
    ptx::barrier_wait(shared.work_ready[slot.index], slot.phase);
    const TileWork<typename C::Walk>& w = shared.work[slot.index];
    if (w.position == kNoMoreTiles) return;
#pragma unroll 1
    for (int step = w.walk.steps().end - 1; step >= w.walk.steps().begin; --step, v.next()) {
      const int tile = w.walk.index(step);
      ptx::barrier_wait(shared.v_free[v.index], v.phase ^ 1);
      if constexpr (C::kTokenScales) bring_scales<C>(p, w, tile, number, shared.scales[v.index]);
      await_filled(shared.v_landed[v.index], v.phase);
      const bool released = planted_release(Plant::late_key_reads, shared.v_taken[v.index]);
      // P is zero where no row attends, but zero times NaN is not.
      if (attention::passes_guard<C>(p, w, tile)) {
        const attention::AttendedRows<C> rows(w, tile);
        const int from = number * kShare, to = from + kShare;
        clear_rows(shared.v[v.index], from, min(rows.begin, to));
        clear_rows(shared.v[v.index], max(rows.end, from), to);
        __syncwarp();
      }
#pragma unroll 1
      for (int key = number * kShare; key < (number + 1) * kShare; key += 32) {
        transpose<C>(shared.v[v.index], shared.transposed[v.index], key);
      }
      finish_reads();  // and what was stored is there for products
      __syncwarp();
      if (C::kTokenScales || first_lane) ptx::barrier_arrive(shared.v_ready[v.index]);
      if (first_lane && !released) ptx::barrier_arrive(shared.v_taken[v.index]);
    }
    __syncwarp();
    ptx::barrier_arrive(shared.work_free[slot.index]);
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd_fp8
