// Which keys a CTA computes the gradients of, and which query tiles meet them.
#pragma once

#include "cuda/sm90/attention_bwd/config.h"

namespace heddle::cuda::sm90::attention_bwd {

struct TileIndex {
  int tile, kv_head, sequence;  // sequence < 0: there is no such tile
};

// Equal lengths: in sections of heads whose rows stay in the L2 cache; in each the first keys first, which a causal
// mask leaves most rows.
__device__ inline TileIndex tile_of_batch(const Params& p, int tile) {
  const int size = p.section * p.k_tiles, first = tile / size * p.section, rest = tile % size;
  const int units = min(p.section, p.units - first), unit = first + rest % units;
  const int heads = static_cast<int>(p.problem.Hkv);
  return {rest / units, unit % heads, unit / heads};
}

// Packed keys: by sequence, then by head, then by tile. The whole warp.
template <class C>
__device__ TileIndex tile_of_packed(const Params& p, int tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32, heads = static_cast<int>(p.problem.Hkv);
  const int batch = static_cast<int>(p.problem.B);
#pragma unroll 1
  for (int from = 0; from < batch; from += 32) {
    const int b = from + lane;
    const int rows = b < batch ? max(p.problem.cu_seqlens_k[b + 1] - p.problem.cu_seqlens_k[b], 0) : 0;
    const int tiles = (rows + C::kTileK - 1) / C::kTileK * heads;
    int before = tiles;  // of the sequences up to this lane's
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffff, before, step);
      if (lane >= step) before += other;
    }
    const unsigned reaches = __ballot_sync(0xffffffff, tile < before);
    if (reaches != 0) {
      const int owner = __ffs(static_cast<int>(reaches)) - 1;
      const int first = __shfl_sync(0xffffffff, before - tiles, owner);
      const int of_head = __shfl_sync(0xffffffff, tiles, owner) / heads, rest = tile - first;
      return {rest % of_head, rest / of_head, from + owner};
    }
    tile -= __shfl_sync(0xffffffff, before, 31);
  }
  return {0, 0, -1};
}

// The whole warp. False: there is nothing to do.
template <class C>
__device__ bool find_work(const Params& p, int tile, Work& w) {
  const AttentionBackwardProblem& problem = p.problem;
  const TileIndex at = problem.cu_seqlens_k != nullptr ? tile_of_packed<C>(p, tile) : tile_of_batch(p, tile);
  if (at.sequence < 0) return false;
  const Sequence s = problem.sequence(at.sequence);
  const int sq = static_cast<int>(s.sq), sk = static_cast<int>(s.sk), off = static_cast<int>(s.off);
  w.first_key = at.tile * C::kTileK;
  w.stored_keys = min(static_cast<int>(s.k_rows) - w.first_key, C::kTileK);
  if (w.stored_keys <= 0) return false;
  w.sequence = at.sequence;
  w.kv_head = at.kv_head;
  w.q_batch = problem.cu_seqlens_q != nullptr ? 0 : at.sequence;
  w.k_batch = problem.cu_seqlens_k != nullptr ? 0 : at.sequence;
  w.q_row = static_cast<int>(s.q_begin);
  w.k_row = static_cast<int>(s.k_begin);
  w.statistics_row = static_cast<int>(any::attention_bwd_rows::first_row(problem, at.sequence, s));
  w.sq = sq;
  w.off = off;
  w.keys = max(min(sk - w.first_key, C::kTileK), 0);
  const int first = max(w.first_key - off - p.right, 0);
  const int last = min(w.first_key + w.keys - 1 - off + p.left, sq - 1);
  w.first_tile = first / C::kTileQ;
  w.tiles = w.keys > 0 && last >= first ? last / C::kTileQ - w.first_tile + 1 : 0;
  w.clears_rows = s.q_begin + s.sq < problem.q_rows;
  return true;
}

}  // namespace heddle::cuda::sm90::attention_bwd
