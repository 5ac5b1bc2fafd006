// Exact attention backward on tensor cores with mma.sync, every option. One CTA takes one tile of keys of a kv head and
// walks over all query tiles that attend it, those of the head's whole group one after the other: dK and dV stay in
// registers, dQ is added up in global memory. See docs/kernels/sm80_attention_bwd.md.
#pragma once

#include "cuda/common/overlap.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention_bwd/loader.cuh"
#include "cuda/sm80/attention_bwd/scores.cuh"
#include "cuda/sm80/attention_bwd/sums.cuh"

namespace heddle::cuda::sm80::attention_bwd {

constexpr int kDqBlocks = 2;  // of dQ, of 8 columns, that a warp multiplies at a time

// dQ = dS K of a query tile, from shared memory to the sums in global memory: a piece of the columns is added while the
// next is multiplied.
template <class C>
__device__ inline void add_dq(const Params& p, const Work& w, int h, int tile, int parity, SharedMemory<C>& shared) {
  constexpr int kGroups = C::Rows::kGroups, kBlocks = Float32<C> ? C::Rows::kBlocks : kDqBlocks;
  constexpr int kPieces = C::Rows::kBlocks / kBlocks;
  const unsigned warp = threadIdx.x / 32, lane = recomputed_by_tile(threadIdx.x % 32, tile);
  const std::uint32_t attended = C::kScoreOptions ? shared.attended[parity][lane % 4] : ~0u;
  int* const turns = w.takes_turns ? p.turns + (h * p.rows_per_head + w.stored_row) / C::kTileQ + tile : nullptr;
  float* const share = dq_sums_of<C>(p, w.stored_row, h, tile);
  const Left<C, kGroups> ds(ptx::shared_address(&shared.ds) + C::Rows::first_row(warp) * C::kPairPitch, lane);
  float sums[2][kGroups][kBlocks][4];
#pragma unroll
  for (int piece = 0; piece <= kPieces; ++piece) {
    if (piece < kPieces) {
      multiply<C>(sums[piece % 2], ds, ptx::shared_address(&shared.k),
                  C::Rows::first_column(warp) + 8 * kBlocks * piece, lane, attended);
    }
    if (piece == 0) {
      if (turns != nullptr) wait_for_turn(turns, turn_of<C>(p, w, tile));
    } else {
      for_each_fragment<C>(share, kBlocks * (piece - 1), sums[1 - piece % 2],
                           [&](float* to, const float(&x)[4]) { add_fragment(to, lane, x); });
      __syncwarp();  // without it, the compiler moves all additions to the end
    }
  }
  if (turns != nullptr) end_turn(turns);
}

// In each step S = Q Kᵀ and dP = dO Vᵀ share one way of dividing a matrix among the warps, dV += Pᵀ dO and dK += dSᵀ Q
// another, and dQ = dS K a third; P and dS change hands in shared memory. While dQ is computed and added, the rows of
// the next step are on their way, and two CTAs on a multiprocessor fill each other's waits.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) attention_bwd_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  const auto& w = shared.work;
  let_next_grid_start();
  const bool apart =
      p.turns == nullptr || any::attention_bwd_rows::lie_apart(p.scores.problem, threadIdx.x, C::kThreads);
  const bool takes_turns = __syncthreads_and(apart) && p.turns != nullptr;
  if (threadIdx.x == 0) {
    shared.work = describe_work<C>(p);
    shared.work.takes_turns = takes_turns;
  }
  if (threadIdx.x < 8) shared.attended[threadIdx.x / 4][threadIdx.x % 4] = 0;
  __syncthreads();
  wait_for_previous_grid();
  if (w.first_key >= w.k_rows) return;

  const unsigned warp = threadIdx.x / 32;
  typename C::Keys::Sums dk, dv;
  clear(dk);
  clear(dv);
  const int begin = p.last_rows_first ? w.steps.end - 1 : w.steps.begin;
  const int end = p.last_rows_first ? w.steps.begin - 1 : w.steps.end;
  int h = w.first_head, left = w.heads * w.steps.size(), step = begin;
  if (left > 0) {
    load_keys<C>(p, w, shared);
    load_rows<C>(p, w, h, w.walk.index(step), shared);
    ptx::copy_async_commit();
  }
#pragma unroll 1
  for (; left > 0; --left) {
    const int parity = left % 2, this_h = h, this_tile = w.walk.index(step);
    ptx::copy_async_wait<0>();
    if (threadIdx.x == 0) shared.work.scores.h = h;
    __syncthreads();
    step += p.last_rows_first ? -1 : 1;
    if (step == end) {
      step = begin;
      ++h;
    }
    if constexpr (C::kScoreOptions) {
      if (threadIdx.x < 4) shared.attended[1 - parity][threadIdx.x] = 0;
    }
    clear_idle_rows<C>(w.scores.sq - this_tile * C::kTileQ, shared);
    if (C::kThreads == 32 * C::kScoreWarps || warp < C::kScoreWarps) {
      typename C::Scores::Sums s, ds;
      compute_pairs<C, true>(p, w, this_tile, parity, s, ds, shared);
      store_pairs<C>(s, ds, this_tile, shared);
    }
    __syncthreads();

    const unsigned lane = recomputed_by_tile(threadIdx.x % 32, this_tile);
    const unsigned key = C::Keys::first_row(warp), column = C::Keys::first_column(warp);
    multiply_transposed<C>(dv, ptx::shared_address(&shared.p), key, ptx::shared_address(&shared.d_o), column, lane);
    multiply_transposed<C>(dk, ptx::shared_address(&shared.ds), key, ptx::shared_address(&shared.q), column, lane);
    __syncthreads();
    if (left > 1) load_rows<C>(p, w, h, w.walk.index(step), shared);
    ptx::copy_async_commit();
    if (p.dq_sums != nullptr) add_dq<C>(p, w, this_h, this_tile, parity, shared);
  }
  if (p.key_sums != nullptr) {
    store_key_sums<C>(dk, key_sums_of<C>(p, w.unit, w.first_key, 0));
    store_key_sums<C>(dv, key_sums_of<C>(p, w.unit, w.first_key, 1));
  } else {
    store_keys<C, 2>(p, w, dk, p.dk_scale, p.dk, p.scores.problem.D);
    store_keys<C, 2>(p, w, dv, p.dv_scale, p.dv, p.scores.problem.Dv);
  }
}

// dK or dV of a tile of keys a CTA, from those of its splits in their order.
template <class C>
__global__ void __launch_bounds__(C::kThreads) finish_keys_kernel(const __grid_constant__ Params p) {
  const unsigned tile = blockIdx.x / 2, group = tile / p.k_tiles, b = p.kv_heads.quotient(group);
  const int which = static_cast<int>(blockIdx.x % 2);
  Work w = describe_sequence<C>(p, static_cast<int>(b), static_cast<int>(group - b * p.kv_heads.divisor));
  w.first_key = static_cast<int>(tile - group * p.k_tiles) * C::kTileK;
  wait_for_previous_grid();
  if (w.first_key >= w.k_rows) return;
  typename C::Keys::Sums sums;
  clear(sums);
#pragma unroll 1
  for (unsigned split = 0; split < p.splits.divisor; ++split) {
    add_key_sums<C>(sums, key_sums_of<C>(p, static_cast<int>(group * p.splits.divisor + split), w.first_key, which));
  }
  store_keys<C, 1>(p, w, sums, which == 0 ? p.dk_scale : p.dv_scale, which == 0 ? p.dk : p.dv,
                   which == 0 ? p.scores.problem.D : p.scores.problem.Dv);
}

// CTAs of finish_dq_kernel on a multiprocessor, as their sums allow: left to itself, code for sm_80 spills.
template <class C>
constexpr int kFinishing = sizeof(typename C::Rows::Sums) <= 128   ? 9
                           : sizeof(typename C::Rows::Sums) <= 256 ? 640 / C::kThreads
                                                                   : 1;

// dQ of a query tile a CTA: scaled, rounded and written, or added.
template <class C>
__global__ void __launch_bounds__(C::kThreads, kFinishing<C>) finish_dq_kernel(const __grid_constant__ Params p) {
  wait_for_previous_grid();
  const unsigned tiles = static_cast<unsigned>(p.q_tiles), unit = blockIdx.x / tiles;
  const int tile = static_cast<int>(blockIdx.x - unit * tiles);
  const unsigned b = p.scores.heads.quotient(unit);
  const int h = static_cast<int>(unit - b * p.scores.heads.divisor);
  const AttentionProblem& a = p.scores.problem;
  const Sequence s = a.stored_sequence(b);
  const int rows = static_cast<int>(s.q_rows) - tile * C::kTileQ;
  if (rows <= 0) return;
  const std::int64_t stored_row = any::attention_bwd_rows::first_row(a, b, s);
  std::byte* const row0 = p.dq.at(b, s.q_begin + std::int64_t{tile} * C::kTileQ, h);
  const auto load = [](const float* from, float(&x)[4]) { load_fragment(from, threadIdx.x % 32, x); };
  float* const share = dq_sums_of<C>(p, stored_row, h, tile);
  if constexpr (!Float32<C>) {
    if (p.dq.dtype != DType::f32) {
      typename C::Rows::Sums sums;
      for_each_fragment<C>(share, 0, sums, load);
      store_rounded<C, typename C::Rows>(p, sums, a.scale, p.dq, row0, rows, a.D);
      return;
    }
  }
  // Some at a time, for the sake of registers: what is added to needs as many.
  const FloatRows to = float_rows(p, p.dq, row0, rows, a.D);
  const unsigned warp = threadIdx.x / 32;
#pragma unroll 1
  for (int n = 0; n < C::Rows::kGroups * C::Rows::kBlocks; n += 4) {
    float sums[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) load(share + (n + i) * 128, sums[i]);
    const int g = n / C::Rows::kBlocks, block = n - g * C::Rows::kBlocks;
    store_floats<C, 1, true>(sums, a.scale, p.accumulate, to,
                             static_cast<int>(C::Rows::first_row(warp)) + kGroupRows * g,
                             static_cast<int>(C::Rows::first_column(warp)) + 8 * block);
  }
}

}  // namespace heddle::cuda::sm80::attention_bwd
