// From products q.k to logits: scale, softcap, ALiBi, bias and mask.
#pragma once

#include "cuda/common/attention/log2.h"
#include "cuda/common/attention/softcap.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/recomputed.cuh"
#include "cuda/sm90/attention_fwd/planes.cuh"

namespace heddle::cuda::sm90::attention_fwd {

// Whether all scores of a warp are small enough for the softcap's series. The answer changes a row's last bits, so it
// must depend on this sequence's scores alone: tiles that hold other scores too, of rows or keys that do not exist, do
// not ask.
template <int kCount>
__device__ __forceinline__ bool small_for(const Softcap& softcap, const float (&s)[kCount]) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) largest = fmaxf(largest, fabsf(s[i]));
  return !__any_sync(0xffffffff, largest > softcap.limit);
}

// What a consumer thread keeps for the score options. Scores stay q.k as long as nothing is added to them: the softmax
// scales and subtracts in one step. Pairs outside the band are left to mask_band().
template <class C>
class ScoreOptions {
  using T = typename C::Element;
  using Walk = typename C::Walk;
  static constexpr int kColumns = C::kTileK / 8;  // pairs of them: s[4 j + 2 r], s[4 j + 2 r + 1]
  static constexpr int kPerLane = KeyValues<C>::kPerLane;

  static __device__ bool has(ScoreOption option) { return (C::kOptions & option) != 0; }
  static __device__ bool by_keys(const ScorePlane& x) { return has(kKeyPlanes) && x.access == PlaneAccess::keys; }
  static __device__ bool by_copies(const ScorePlane& x) { return has(kTilePlanes) && x.access == PlaneAccess::copies; }

 public:
  // tiles, scratch: this warp's. warp_row: its first row in the warpgroup.
  __device__ __forceinline__ void begin(const Params& p, PlaneTiles<C>& tiles, const TileWork<Walk>& w, int first_row) {
    if (!has(kTilePlanes)) return;
    stage = 0;
#pragma unroll 1
    for (int n = 1; n <= C::kPlaneStages; ++n) copy(p, tiles, w, first_row, w.walk.steps().end - n, n - 1);
  }

  // Loads that can be on their way while a key tile's products run.
  __device__ __forceinline__ void load(const Params& p, const Work& w, const ThreadRows& rows, int k_tile) {
    if (has(kAlibi) && p.alibi != nullptr) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        slope[r] = p.alibi[w.sequence * p.alibi_stride_b + rows.head(p, w, r) * p.alibi_stride_h];
      }
    }
    if (by_keys(p.bias)) {
      if (p.bias_is_float) {
        key_bias.template load<std::uint32_t>(p.bias, w, k_tile, 0);
      } else {
        key_bias.template load<std::uint16_t>(p.bias, w, k_tile, 0);
      }
    }
    if (by_keys(p.mask)) key_mask.template load<std::uint8_t>(p.mask, w, k_tile, 1);
  }

  // own: all rows and keys of the tile are this sequence's. Returns what s must be multiplied with to be logits.
  __device__ __forceinline__ float apply(const Params& p, const TileWork<Walk>& w, const ThreadRows& rows,
                                         int first_row, int step, bool own, PlaneTiles<C>& tiles, float* scratch,
                                         float (&s)[C::kTileK / 2]) {
    const int k_tile = w.walk.index(step);
    float unit = p.scale;
    if (has(kSoftcap) && p.softcap.inside != 0.0f) cap(p.softcap, own, s);
    if (has(kAnyPlanes) && !(unit > 0.0f)) {  // the softmax takes the largest s before it scales, which takes unit > 0
#pragma unroll
      for (int i = 0; i < C::kTileK / 2; ++i) s[i] *= unit;
      unit = 1.0f;
    }
    if (has(kAlibi) && p.alibi != nullptr) {
      add_alibi<C>(p, w, rows, k_tile, slope, unit, s);
      unit = 1.0f;
    }
    // First add, then remove pairs: a bias may be NaN where a mask is false, and the pair must still end as -inf.
    bool open[kPerLane];
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) open[e] = !by_keys(p.mask) || key_mask.bits[e] != 0;
    if (by_keys(p.bias)) add_key_bias(p, scratch, open, unit, s);
    const bool copies = by_copies(p.bias) || by_copies(p.mask);
    if (copies) {
      ptx::copy_async_wait<C::kPlaneStages - 1>();
      __syncwarp();
    }
    if (by_copies(p.bias)) add_bias_tile(tiles.bias(stage), unit, s);
    if constexpr ((C::kOptions & kAnyPlanes) != 0) {
#pragma unroll 1
      for (int n = 0; n < 2; ++n) {
        const ScorePlane& plane = n == 0 ? p.bias : p.mask;
        if (plane.access != PlaneAccess::direct || w.used_rows == 0 || w.keys == 0) continue;
        add_elements(plane, n == 1, p, w, rows.first, first_row - rows.first, k_tile, scratch, unit, s);
        unit = 1.0f;
      }
    }
    if (by_copies(p.mask)) remove_by_tile(tiles.mask(stage), s);
    if (copies) {
      __syncwarp();
      copy(p, tiles, w, first_row, step - C::kPlaneStages, stage);
      if (++stage == C::kPlaneStages) stage = 0;
    }
    if (by_keys(p.bias) || by_keys(p.mask)) remove_keys(open, s);
    return unit;
  }

 private:
  using Scores = float (&)[C::kTileK / 2];

  // Commits one group of copies a key tile, an empty one where there is nothing to copy: apply() waits by counting
  // groups.
  static __device__ __forceinline__ void copy(const Params& p, PlaneTiles<C>& tiles, const TileWork<Walk>& w,
                                              int first_row, int step, int stage) {
    if (step >= w.walk.steps().begin && w.used_rows > 0) {
      const int k_tile = w.walk.index(step);
      if (by_copies(p.bias)) copy_plane<C, 2>(p.bias, w, first_row, k_tile, tiles.bias(stage));
      if (by_copies(p.mask)) copy_plane<C, 1>(p.mask, w, first_row, k_tile, tiles.mask(stage));
    }
    ptx::copy_async_commit();
  }

  static __device__ __forceinline__ void cap(const Softcap& softcap, bool own, Scores s) {
    if (C::kOptions == kSoftcap || !own || !small_for(softcap, s)) {
      const float to_exponent = 2.0f * kLog2e * softcap.inside;
#pragma unroll
      for (int i = 0; i < C::kTileK / 2; ++i) s[i] = capped_by_fma(s[i], to_exponent, softcap.outside);
      return;
    }
    const float(&c)[4] = softcap.series;
#pragma unroll
    for (int i = 0; i < C::kTileK / 2; ++i) {
      const float square = s[i] * s[i];
      s[i] *= fmaf(fmaf(fmaf(c[3], square, c[2]), square, c[1]), square, c[0]);
    }
  }

  // Adds a bias by keys, through `scratch`, C::kTileK floats of this warp. A bias of -inf closes its key: -inf added to
  // a score that is NaN would be NaN, so the score is set to -inf at the end.
  __device__ __forceinline__ void add_key_bias(const Params& p, float* scratch, bool (&open)[kPerLane], float& unit,
                                               Scores s) const {
    const int lane = recomputed(static_cast<int>(threadIdx.x)) % 32;
    float bias[kPerLane];
    bool any = false;
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) {
      bias[e] = p.bias_is_float ? __uint_as_float(key_bias.bits[e]) : to_float2<T>(key_bias.bits[e]).x;
      open[e] &= bias[e] != -INFINITY;
      any |= bias[e] != 0.0f;
    }
    if (!__any_sync(0xffffffff, any)) return;
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) scratch[kPerLane * lane + e] = bias[e];
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(scratch + 8 * j + lane % 4 * 2);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        s[4 * j + 2 * r] = fmaf(s[4 * j + 2 * r], unit, pair.x);
        s[4 * j + 2 * r + 1] = fmaf(s[4 * j + 2 * r + 1], unit, pair.y);
      }
    }
    __syncwarp();
    unit = 1.0f;
  }

  // open: of this lane's keys. All lanes learn which keys of the tile are closed; most tiles have none.
  static __device__ __forceinline__ void remove_keys(const bool (&open)[kPerLane], Scores s) {
    const int pair = recomputed(static_cast<int>(threadIdx.x)) % 4;
    unsigned lanes[kPerLane], all = 0xffffffff;
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) all &= lanes[e] = __ballot_sync(0xffffffff, open[e]);
    if (all == 0xffffffff) return;
      // Key 8 j + 2 pair + c is number (2 pair + c) % kPerLane of lane (8 j + 2 pair + c) / kPerLane.
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const unsigned mine =
          (kPerLane == 4 && pair % 2 == 1 ? lanes[kPerLane - 2 + c] : lanes[c]) >> 2 * pair / kPerLane;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if ((mine & 1u << 8 * j / kPerLane) != 0) continue;
        s[4 * j + c] = -INFINITY;
        s[4 * j + 2 + c] = -INFINITY;
      }
    }
  }

  static __device__ __forceinline__ void add_bias_tile(const std::byte* tile, float& unit, Scores s) {
    const int lane = recomputed(static_cast<int>(threadIdx.x)) % 32;
    const std::byte* row = tile + lane % 16 * (2 * C::kTileK);
#pragma unroll
    for (int m = 0; m < C::kTileK / 16; ++m) {
      std::uint32_t words[4];  // (row, column), (row + 8, column), (row, column + 8), (row + 8, column + 8)
      ptx::load_matrix_x4(words, row + 16 * ((2 * m + lane / 16) ^ (lane % 8)));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = to_float2<T>(words[i]);
        float* x = s + 8 * m + 2 * i;
        x[0] = fmaf(x[0], unit, pair.x);
        x[1] = fmaf(x[1], unit, pair.y);
      }
    }
    unit = 1.0f;
  }

  static __device__ __forceinline__ void remove_by_tile(const std::byte* tile, Scores s) {
    const int lane = recomputed(static_cast<int>(threadIdx.x)) % 32, row = lane / 4;
    const int swizzle = C::kTileK == 64 ? row / 2 % 4 : row;  // of row + 8, too
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::uint32_t pair = *reinterpret_cast<const std::uint16_t*>(
            tile + (row + 8 * r) * C::kTileK + 16 * (j / 2 ^ swizzle) + 8 * (j % 2) + lane % 4 * 2);
        if ((pair & 0x00FF) == 0) s[4 * j + 2 * r] = -INFINITY;
        if ((pair & 0xFF00) == 0) s[4 * j + 2 * r + 1] = -INFINITY;
      }
    }
  }

  // Whatever the strides: 32 keys of the warp's rows at a time through `scratch`, where key c of row r lies at
  // c ^ (8 (r % 4)).
  static __device__ __forceinline__ void add_elements(const ScorePlane& plane, bool is_mask, const Params& p,
                                                      const Work& w, int first, int warp_row, int k_tile,
                                                      float* scratch, float unit, Scores s) {
    constexpr int kTogether = C::kValueSize <= 128 ? 4 : 2;  // loads in flight: as many as there are registers for
    const int lane = recomputed(static_cast<int>(threadIdx.x)) % 32;
#pragma unroll
    for (int piece = 0; piece < C::kTileK / 32; ++piece) {
#pragma unroll 1
      for (int begin = 0; begin < 16; begin += kTogether) {
        std::int64_t at[kTogether];
        float values[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          at[i] = plane_offset(plane, p, w, {first, warp_row + begin + i}, k_tile * C::kTileK + 32 * piece + lane);
        }
        load_elements<T>(plane, is_mask, p.bias_is_float, at, values);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) scratch[32 * (begin + i) + (lane ^ 8 * ((begin + i) % 4))] = values[i];
      }
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = lane / 4 + 8 * r;
          const float2 pair =
              *reinterpret_cast<const float2*>(scratch + 32 * row + (8 * j + lane % 4 * 2 ^ 8 * (row % 4)));
          float* x = s + 4 * (4 * piece + j) + 2 * r;
          x[0] = pair.x == -INFINITY ? -INFINITY : fmaf(x[0], unit, pair.x);
          x[1] = pair.y == -INFINITY ? -INFINITY : fmaf(x[1], unit, pair.y);
        }
      }
      __syncwarp();
    }
  }

  KeyValues<C> key_bias, key_mask;
  float slope[2];
  int stage = 0;
};

}  // namespace heddle::cuda::sm90::attention_fwd
