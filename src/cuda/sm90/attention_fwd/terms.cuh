// What is added to scores by key alone, as 16 more columns of q and k: one more step of the product instead of work for
// every element.
//
//   column   of k, for key j of a tile             of q
//   0 - 2    bias / scale in three parts, as far   the parts' units
//            as they go; -inf in the first where
//            the key is closed
//   3 - 5    j - kTileK / 2                        slope / scale in three parts, less in tiles right of the rows
//
// ALiBi at the middle of the tile is a constant of a row, which the softmax adds. Where k of a closed key is not
// finite, its score is NaN instead of -inf, O comes out as NaN, and the tile is computed again as a careful one
// (guard.cuh). So is one where a row's largest logit comes near what three parts can hold; the bias is then added to
// the scores themselves.
#pragma once

#include "cuda/common/attention/log2.h"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/common/recomputed.cuh"
#include "cuda/sm90/attention_fwd/planes.cuh"

namespace heddle::cuda::sm90::attention_fwd {

// A float as a sum of three 16-bit ones in these units. float16's units make up for its narrow exponents: up to 2^31,
// in steps of 2^-31.
template <class T>
struct Parts;
template <>
struct Parts<__nv_bfloat16> {
  static constexpr float kUnit0 = 1, kUnit1 = 1, kUnit2 = 1, kLargest = 3.3e38f;
};
template <>
struct Parts<__half> {
  static constexpr float kUnit0 = 32768, kUnit1 = 16, kUnit2 = 0.0078125f, kLargest = 2.1e9f;
};

template <class T>
__device__ inline float rounded(float x) {
  return static_cast<float>(static_cast<T>(x));
}

// Splits x, limited to what the parts can hold. Infinities and NaN stay what they are.
template <class T>
__device__ inline void split(float x, float (&part)[3]) {
  const bool finite = fabsf(x) < INFINITY;
  if (finite) x = fminf(fmaxf(x, -Parts<T>::kLargest), Parts<T>::kLargest);
  part[0] = rounded<T>(x * (1.0f / Parts<T>::kUnit0));
  x = finite ? x - part[0] * Parts<T>::kUnit0 : 0.0f;
  part[1] = rounded<T>(x * (1.0f / Parts<T>::kUnit1));
  part[2] = rounded<T>((x - part[1] * Parts<T>::kUnit1) * (1.0f / Parts<T>::kUnit2));
}

// Writes, once before the first tile, those columns that are the same for all tiles. The whole warp.
template <class C>
__device__ void begin_terms(SharedMemory<C>& shared) {
  using T = typename C::Element;
  using P = Parts<T>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (auto& terms : shared.key_terms) {
    for (int key = lane; key < C::kTileK; key += 32) {
      const auto place = static_cast<float>(key - C::kTileK / 2);
      *reinterpret_cast<uint4*>(terms.columns[0][key]) = {0, ptx::pack2<T>(0.0f, place), ptx::pack2<T>(place, place),
                                                          0};
      *reinterpret_cast<uint4*>(terms.columns[1][key]) = make_uint4(0, 0, 0, 0);
    }
  }
  for (auto& terms : shared.row_terms) {
    for (auto& side : terms.columns) {
      for (int row = lane; row < kRows; row += 32) {
        *reinterpret_cast<uint4*>(side[0][row]) = {ptx::pack2<T>(P::kUnit0, P::kUnit1), ptx::pack2<T>(P::kUnit2, 0.0f),
                                                   0, 0};
        *reinterpret_cast<uint4*>(side[1][row]) = make_uint4(0, 0, 0, 0);
      }
    }
  }
  ptx::fence_async_shared();
}

// Whether the guard writes something down for each key tile (serve_keys()). k_ready then waits for two arrivals: of the
// copy of k and of the guard.
template <class C>
__device__ inline bool has_key_values(const Params& p) {
  return (C::kHasKeyTerms && p.bias.access == PlaneAccess::keys) ||
         ((C::kHasKeyTerms || C::kHasBulkPlane) && p.mask.access == PlaneAccess::keys);
}

// What this lane's keys of a key tile add: their bias / scale, -inf where they are closed.
template <class C>
class KeyTileValues {
  using T = typename C::Element;
  static constexpr int kPerLane = KeyValues<C>::kPerLane;
  float values[kPerLane];

 public:
  __device__ __forceinline__ KeyTileValues(const Params& p, const TileWork<typename C::Walk>& w, int k_tile) {
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) values[e] = 0.0f;
    KeyValues<C> of_keys;
    if (C::kHasKeyTerms && p.bias.access == PlaneAccess::keys) {
      if (p.bias_is_float) {
        of_keys.template load<std::uint32_t>(p.bias, w, k_tile, 0);
      } else {
        of_keys.template load<std::uint16_t>(p.bias, w, k_tile, 0);
      }
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) {
        const float x = p.bias_is_float ? __uint_as_float(of_keys.bits[e]) : to_float2<T>(of_keys.bits[e]).x;
        // Limited, so that what was finite does not become infinite by the division.
        values[e] = fabsf(x) < INFINITY ? fminf(fmaxf(x * p.scale_inverse, -3e38f), 3e38f) : x;
        if (w.careful && x != -INFINITY) values[e] = 0.0f;
      }
    }
    if (p.mask.access == PlaneAccess::keys) {
      of_keys.template load<std::uint8_t>(p.mask, w, k_tile, 1);
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) {
        if (of_keys.bits[e] == 0) values[e] = -INFINITY;
      }
    }
  }

  // The whole warp.
  __device__ __forceinline__ void write(SharedMemory<C>& shared, int place) const {
    static_assert(kPerLane == 4, "as closed_keys lies");
    const int lane = static_cast<int>(threadIdx.x) % 32;
    unsigned closed[kPerLane];
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) {
      if constexpr (C::kHasKeyTerms) {
        float part[3];
        split<T>(values[e], part);
        auto& columns = shared.key_terms[place].columns[0][kPerLane * lane + e];
        *reinterpret_cast<std::uint32_t*>(columns) = ptx::pack2<T>(part[0], part[1]);
        columns[2] = static_cast<T>(part[2]);
      }
      closed[e] = __ballot_sync(0xffffffff, values[e] == -INFINITY);
    }
    if (lane < 4) {
      // Key 8 j + 2 a + c is number 2 (a % 2) + c of lane 2 j + a / 2.
      const unsigned first = lane % 2 == 0 ? closed[0] : closed[2], second = lane % 2 == 0 ? closed[1] : closed[3];
      shared.closed_keys[place][lane] = (first >> lane / 2 & 0x55555555) | (second >> lane / 2 & 0x55555555) << 1;
    }
  }
};

// s becomes s unit + bias, in a careful tile. unit becomes 1.
template <class C>
__device__ __forceinline__ void add_key_bias(const Params& p, const Work& w, int k_tile, float& unit,
                                             float (&s)[C::kTileK / 2]) {
  const int first = k_tile * C::kTileK + recomputed(static_cast<int>(threadIdx.x)) % 4 * 2;
#pragma unroll
  for (int j = 0; j < C::kTileK / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int key = first + 8 * j + c;
      if (key >= w.keys) continue;
      const std::int64_t at[1] = {plane_begin(p.bias, w) + key * p.bias.stride_j};
      float bias[1];
      load_elements<typename C::Element>(p.bias, false, p.bias_is_float, at, bias);
      if (bias[0] == -INFINITY) continue;  // a closed key: see remove_closed()
      s[4 * j + c] = fmaf(s[4 * j + c], unit, bias[0]);
      s[4 * j + 2 + c] = fmaf(s[4 * j + 2 + c], unit, bias[0]);
    }
  }
  unit = 1.0f;
}

// On which side of a warpgroup's rows the keys of a tile lie.
enum class Side : int { left, both, right };

template <class C>
__device__ __forceinline__ Side side_of_keys(const Params& p, const Work& w, int first_position, int k_tile) {
  if constexpr (!C::kHasAlibiTerms) return Side::left;
  const int row = first_position + w.off, key = k_tile * C::kTileK;
  return key + C::kTileK - 1 <= row ? Side::left : key >= row + p.positions - 1 ? Side::right : Side::both;
}

// A float as the sum of three 16-bit ones, without units: they are multiplied with numbers up to kTileK / 2 only.
template <class T>
__device__ inline void split_slope(float x, float (&part)[3]) {
  constexpr float kLargest = Parts<T>::kUnit0 != 1.0f ? 65000.0f : 3.3e38f;
  x = fminf(fmaxf(x, -kLargest), kLargest);
  part[0] = rounded<T>(x);
  part[1] = rounded<T>(x - part[0]);
  part[2] = rounded<T>(x - part[0] - part[1]);
}

// The columns of q with ALiBi, of a warp's 16 rows, for each Side. barrier: the warpgroup's.
template <class C>
__device__ __forceinline__ void write_row_terms(const Params& p, RowTerms<C>& terms, const Work& w, int first_position,
                                                int warp_row, int barrier) {
  using T = typename C::Element;
  using P = Parts<T>;
  const int lane = recomputed(static_cast<int>(threadIdx.x)) % 32;
  ptx::barrier_sync(barrier, 128);  // all products with the columns of the last tile are done
  if (lane < 16) {
    const ThreadRows row{first_position, warp_row + lane};
    const float slope = p.alibi[w.sequence * p.alibi_stride_b + row.head(p, w, 0) * p.alibi_stride_h];
    float part[3];
    split_slope<T>(slope / p.scale, part);
    terms.slope[warp_row + lane] = slope * (C::kRemovesPairs ? 1.0f : kLog2e);
#pragma unroll
    for (int side = 0; side < 3; ++side) {
      const float sign = static_cast<float>(1 - side);
      *reinterpret_cast<uint4*>(terms.columns[side][0][warp_row + lane]) = {
          ptx::pack2<T>(P::kUnit0, P::kUnit1), ptx::pack2<T>(P::kUnit2, sign * part[0]),
          ptx::pack2<T>(sign * part[1], sign * part[2]), 0};
    }
  }
  ptx::fence_async_shared();
  ptx::barrier_sync(barrier, 128);
}

// Sets the scores of closed keys to -inf. word: this lane's of SharedMemory::closed_keys.
template <class C>
__device__ __forceinline__ void remove_closed(std::uint32_t word, float (&s)[C::kTileK / 2]) {
  if (!__any_sync(0xffffffff, word != 0)) return;
#pragma unroll
  for (int j = 0; j < C::kTileK / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if ((word & 1u << (2 * j + c)) == 0) continue;
      s[4 * j + c] = -INFINITY;
      s[4 * j + 2 + c] = -INFINITY;
    }
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd
