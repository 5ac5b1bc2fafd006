// How the elements of a bias or mask (a plane) that a consumer warp needs for its rows and a key tile reach it; the
// ways are those of PlaneAccess.
#pragma once

#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/recomputed.cuh"
#include "cuda/sm90/attention_fwd/scores.cuh"

namespace heddle::cuda::sm90::attention_fwd {

// Where a plane's row 0 and key 0 of this sequence and head unit are (elements).
__device__ inline std::int64_t plane_begin(const ScorePlane& plane, const Work& w) {
  return w.sequence * plane.stride_b + w.h * plane.stride_h;
}

// Starts to copy the plane at 16 rows from `first` on, and at a key tile, into a warp's place in shared memory, in
// units of kUnit bytes. The whole warp. Not for tiles of several heads. Rows and keys beyond those in use are not read.
template <class C, int kElement, int kUnit>
__device__ inline void copy_plane(const ScorePlane& plane, const Work& w, int first, int k_tile, std::byte* to) {
  constexpr int kPitch = C::kTileK * kElement, kUnits = kPitch / kUnit;
  // A lane copies the unit at `byte` of every kStep-th row, or of every row all units that are 32 apart.
  constexpr int kStep = kUnits < 32 ? 32 / kUnits : 1, kAcross = kUnits < 32 ? kUnits : 32;
  const int lane = recomputed(static_cast<int>(threadIdx.x)) % 32, last = w.used_rows - 1, keys = w.keys;
  const int row = lane / kAcross, left_byte = k_tile * kPitch + lane % kAcross * kUnit;
  const std::int64_t row_bytes = plane.stride_i * kElement;
  const auto* from = static_cast<const std::byte*>(plane.data) + plane_begin(plane, w) * kElement + left_byte +
                     min(first + row, last) * row_bytes;
  const std::uint32_t begin = ptx::shared_address(to);
#pragma unroll(kUnit == 16 ? PlaneTiles <C>::kRowsOfWarp : 1)
  for (int n = 0; n < PlaneTiles<C>::kRowsOfWarp / kStep; ++n) {
    const int r = row + n * kStep, swizzle = kPitch == 64 ? r / 2 % 4 : r % 8;
#pragma unroll
    for (int u = 0; u < kUnits / kAcross; ++u) {
      const int byte = (lane % kAcross + 32 * u) * kUnit;
      ptx::copy_async<kUnit>(begin + r * kPitch + (byte / 16 ^ swizzle) * 16 + byte % 16, from + 32 * u * kUnit,
                             min(max(keys * kElement - left_byte - 32 * u * kUnit, 0), kUnit));
    }
    if (first + r + kStep <= last) from += kStep * row_bytes;
  }
}

template <class C, int kElement>
__device__ inline void copy_plane(const ScorePlane& plane, const Work& w, int first, int k_tile, std::byte* to) {
  if (plane.copy_bytes == 16) {
    copy_plane<C, kElement, 16>(plane, w, first, k_tile, to);
  } else {
    copy_plane<C, kElement, 4>(plane, w, first, k_tile, to);
  }
}

// The values of a key tile's keys where all rows share them: this lane's kPerLane neighbours.
template <class C>
struct KeyValues {
  static constexpr int kPerLane = C::kTileK / 32;
  std::uint32_t bits[kPerLane];

  // Element: float, or an integer of the element's size. Keys not in use read as `beyond`.
  template <class Element>
  __device__ void load(const ScorePlane& plane, const Work& w, int k_tile, std::uint32_t beyond) {
    const int key = k_tile * C::kTileK + recomputed(static_cast<int>(threadIdx.x)) % 32 * kPerLane;
    const auto* from = static_cast<const Element*>(plane.data) + plane_begin(plane, w) + key * plane.stride_j;
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) bits[e] = key + e < w.keys ? from[e * plane.stride_j] : beyond;
  }
};

// Where the element at a row of a warpgroup and a key is. Rows and keys behind the last one in use share that one's, so
// that nothing beyond the tensor is read.
__device__ inline std::int64_t plane_offset(const ScorePlane& plane, const Params& p, const Work& w,
                                            const ThreadRows& rows, int key) {
  return w.sequence * plane.stride_b + rows.head(p, w, 0) * plane.stride_h +
         min(rows.position(p, 0), w.used_rows - 1) * plane.stride_i + min(key, w.keys - 1) * plane.stride_j;
}

// Loads elements as numbers to add to scores: those of a mask, which are bytes, become 0 or -inf.
template <class T, int kCount>
__device__ __forceinline__ void load_elements(const ScorePlane& plane, bool is_mask, bool is_float,
                                              const std::int64_t (&at)[kCount], float (&values)[kCount]) {
  if (is_mask) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = static_cast<const unsigned char*>(plane.data)[at[i]] != 0 ? 0.0f : -INFINITY;
    }
  } else if (is_float) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = static_cast<const float*>(plane.data)[at[i]];
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = static_cast<float>(static_cast<const T*>(plane.data)[at[i]]);
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd
