// Scales of k and v by token. The transposing warps bring those of a tile to shared memory; a consumer multiplies S
// with k's, and P, before it is rounded, with v's. So that P stays in e4m3's range, the largest of a tile's v scales is
// taken out: O takes it back when P V is added.
#pragma once

#include "cuda/sm90/attention_fwd_fp8/config.h"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

// The share of one transposing warp: scales of its own keys, though it reads all of v's, for the largest. The whole
// warp.
template <class C>
__device__ void bring_scales(const Params& p, const TileWork<typename C::Walk>& w, int tile, int number,
                             TokenScales<C>& to) {
  constexpr int kShare = C::kTileK / C::kTransposers, kOwn = kShare / 32, kAll = C::kTileK / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, h = w.h / p.kv_divisor;
  // Keys that no row attends have scale 0, whatever is stored there.
  const auto scale = [&](const Scales& x, int key) {
    const int j = tile * C::kTileK + key;
    return j >= w.walk.keys().begin && j < w.walk.keys().end ? x.at(w.sequence, w.k_row + j, h) : 0.0f;
  };
  const int own = number * kShare + lane;
  float k[kOwn], v[kAll];
#pragma unroll
  for (int n = 0; n < kOwn; ++n) k[n] = scale(p.k_scale, own + 32 * n);
#pragma unroll
  for (int n = 0; n < kAll; ++n) v[n] = scale(p.v_scale, (own + 32 * n) % C::kTileK);
  unsigned bits = 0;  // of magnitudes: they order as the numbers do
#pragma unroll
  for (int n = 0; n < kAll; ++n) bits = max(bits, __float_as_uint(v[n]) & 0x7FFFFFFF);
  bits = __reduce_max_sync(0xffffffff, bits);
  const float largest = bits < 0x00800000 ? 1.0f : __uint_as_float(bits), inverse = __frcp_rn(largest);
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    to.k[own + 32 * n] = k[n];
    to.v[own + 32 * n] = v[n] * inverse;
  }
  if (number == 0 && lane == 0) to.largest_v = largest;
}

}  // namespace heddle::cuda::sm90::attention_fwd_fp8
