// Tiles on their way to shared memory. What lies beyond a sequence's lengths, and keys that
// no row attends, arrive as zeros.
#pragma once

#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention/rows.cuh"
#include "cuda/sm80/attention_bwd/schedule.cuh"

namespace heddle::cuda::sm80::attention_bwd {

// Rows [first, first + kRows) of one head. row0: its row 0.
template <class C, int kRows>
__device__ inline void load_tile(const Params& p, const Operand& x, const std::byte* row0, std::int64_t size, int first,
                                 int begin, int end, Tile<typename C::Element, kRows, C::kHeadSize>& to) {
  const std::int64_t stride = static_cast<std::int64_t>(sizeof(typename C::Element)) * x.stride_s;
  const auto make_source = [&](int row, unsigned bytes) {
    return attention::DenseRows{row0 + bytes + row * stride, stride};
  };
  const int columns = static_cast<int>(size);
  if (p.in_pieces) {
    attention::AlignedRows::load<C::kThreads>(to, x, columns, first, begin, end, make_source);
  } else {
    attention::StridedRows::load<C::kThreads>(to, x, columns, first, begin, end, make_source);
  }
}

template <class C>
__device__ inline void load_keys(const Params& p, const Work& w, SharedMemory<C>& shared) {
  const AttentionProblem& a = p.scores.problem;
  load_tile<C>(p, a.k, w.k, a.D, w.first_key, w.met.begin, w.met.end, shared.k);
  load_tile<C>(p, a.v, w.v, a.Dv, w.first_key, w.met.begin, w.met.end, shared.v);
}

// q, d_o and the statistics of a query tile.
template <class C>
__device__ inline void load_rows(const Params& p, const Work& w, int h, int tile, SharedMemory<C>& shared) {
  const AttentionProblem& a = p.scores.problem;
  const int first = tile * C::kTileQ;
  const auto row0 = [&](const Operand& x) { return x.at(w.scores.b, w.scores.q_row, h); };
  load_tile<C>(p, a.q, row0(a.q), a.D, first, 0, w.scores.sq, shared.q);
  constexpr unsigned kPieces = C::kTileQ / 4;
  static_assert(2 * kPieces <= C::kThreads);
  if (threadIdx.x < 2 * kPieces) {
    const unsigned piece = threadIdx.x % kPieces;
    const float* from = threadIdx.x < kPieces ? p.lse_log2 : p.delta;
    float* to = threadIdx.x < kPieces ? shared.lse_log2 : shared.delta;
    ptx::copy_async_16(ptx::shared_address(to + 4 * piece),
                       from + h * p.rows_per_head + w.stored_row + first + 4 * piece, true);
  }
  load_tile<C>(p, p.d_o, row0(p.d_o), a.Dv, first, 0, w.scores.sq, shared.d_o);
}

// Rows without keys may hold anything, which no product may meet: zeros take their place. All threads, of a tile that
// has landed; nearly always there is no such row.
// existing: how many of them there are.
template <class C, class Shared>
__device__ inline void clear_idle_rows(int existing, Shared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  bool idle = false;
#pragma unroll
  for (int from = 0; from < C::kTileQ; from += 32) {
    const int row = from + lane;
    if (row < C::kTileQ) idle |= row < existing && shared.lse_log2[row] == INFINITY;
  }
  if (!__any_sync(0xffffffff, idle)) return;  // one answer in all warps
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) / 32; row < C::kTileQ; row += C::kThreads / 32) {
    if (shared.lse_log2[row] != INFINITY) continue;
#pragma unroll 1
    for (unsigned chunk = lane; chunk < C::kPitch / 16; chunk += 32) {
      const std::uint32_t at = swizzled(C::kPitch, row, chunk);
      ptx::store_shared_16(ptx::shared_address(&shared.q) + at, {0, 0, 0, 0});
      ptx::store_shared_16(ptx::shared_address(&shared.d_o) + at, {0, 0, 0, 0});
    }
  }
  __syncthreads();
}

}  // namespace heddle::cuda::sm80::attention_bwd
