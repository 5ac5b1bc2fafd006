// What becomes of sums in registers: dQ is added up in global memory, dK and dV are rounded and written.
#pragma once

#include "cuda/common/shared_sums.cuh"
#include "cuda/sm80/attention_bwd/scores.cuh"

namespace heddle::cuda::sm80::attention_bwd {

// This warp's share of a query tile's sums of dQ: fragments of 128 floats, so that additions are whole lines.
template <class C>
__device__ inline float* dq_sums_of(const Params& p, std::int64_t stored_row, int h, int tile) {
  const std::int64_t row = h * p.rows_per_head + stored_row + std::int64_t{tile} * C::kTileQ;
  const unsigned warp = threadIdx.x / 32;
  constexpr int kOfWarp = C::Rows::kGroups * C::Rows::kBlocks * 128;
  return p.dq_sums + (row * C::kHeadSize + warp * kOfWarp);
}

// Calls visit(fragment, sums of it) for the blocks of a warp's share from `first` on.
template <class C, int kBlocks, class Visit>
__device__ inline void for_each_fragment(float* share, int first, float (&sums)[C::Rows::kGroups][kBlocks][4],
                                         Visit visit) {
#pragma unroll
  for (int g = 0; g < C::Rows::kGroups; ++g) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) visit(share + (g * C::Rows::kBlocks + first + n) * 128, sums[g][n]);
  }
}

// The first `count` elements of a piece, one by one.
template <class T>
__device__ inline void store_elements(T* to, std::int64_t stride, uint4 piece, int count) {
#pragma unroll 1
  for (int n = 0; n < count; ++n, to += stride) {
    if constexpr (sizeof(T) == 2) {
      *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(piece.x);
      piece.x = __funnelshift_r(piece.x, piece.y, 16);
      piece.y = __funnelshift_r(piece.y, piece.z, 16);
      piece.z = __funnelshift_r(piece.z, piece.w, 16);
      piece.w >>= 16;
    } else {
      *reinterpret_cast<std::uint32_t*>(to) = piece.x;
      piece = {piece.y, piece.z, piece.w, 0};
    }
  }
}

// A warp's share of sums, times `scale`, to the rows below `rows` of an output's head with `size` columns. row0: its
// row 0. A row leaves in runs of 64 bytes (float32: 128) from four lanes.
template <class C, class ShareOfWarp>
__device__ inline void store_sums(const Params& p, const typename ShareOfWarp::Sums& sums, float scale,
                                  const Operand& x, std::byte* row0, int rows, std::int64_t size) {
  static_assert(ShareOfWarp::kBlocks % 4 == 0);
  using T = typename C::Element;
  constexpr int kPieces = sizeof(T) / 2, kPiece = 16 / sizeof(T);  // a lane's, of four blocks; elements of one
  const unsigned warp = threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_column = static_cast<int>(ShareOfWarp::first_column(warp)) + kPiece * kPieces * (lane % 4);
#pragma unroll
  for (int g = 0; g < ShareOfWarp::kGroups; ++g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = static_cast<int>(ShareOfWarp::first_row(warp)) + kGroupRows * g + 8 * r + lane / 4;
      T* const to = reinterpret_cast<T*>(row0) + row * x.stride_s;
#pragma unroll
      for (int n = 0; n < ShareOfWarp::kBlocks; n += 4) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const uint4 piece = piece_of<C>(sums[g], n, 2 * r + i, lane, scale);
          const int column = first_column + 8 * n + kPiece * i;
          if (row >= rows || column >= size) continue;
          if (p.out_pieces) {
            *reinterpret_cast<uint4*>(to + column) = piece;
          } else {
            store_elements(to + column * x.stride_d, x.stride_d, piece, min(static_cast<int>(size) - column, kPiece));
          }
        }
      }
    }
  }
}

// A split's sums of dK (which = 0) or dV (1) of a tile of keys: of each warp fragments of 128 floats.
template <class C>
__device__ inline float* key_sums_of(const Params& p, int unit, int first_key, int which) {
  const std::int64_t tile = std::int64_t{unit} * p.k_tiles + first_key / C::kTileK;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  return p.key_sums + (2 * tile + which) * (C::kTileK * C::kHeadSize) +
         warp * (C::Keys::kGroups * C::Keys::kBlocks * 128);
}

template <class C>
__device__ inline void store_key_sums(const typename C::Keys::Sums& sums, float* share) {
  float4* const to = reinterpret_cast<float4*>(share) + threadIdx.x % 32;
#pragma unroll
  for (int g = 0; g < C::Keys::kGroups; ++g) {
#pragma unroll
    for (int n = 0; n < C::Keys::kBlocks; ++n) {
      to[32 * (g * C::Keys::kBlocks + n)] = {sums[g][n][0], sums[g][n][1], sums[g][n][2], sums[g][n][3]};
    }
  }
}

template <class C>
__device__ inline void add_key_sums(typename C::Keys::Sums& sums, const float* share) {
  const float4* const from = reinterpret_cast<const float4*>(share) + threadIdx.x % 32;
#pragma unroll
  for (int g = 0; g < C::Keys::kGroups; ++g) {
#pragma unroll
    for (int n = 0; n < C::Keys::kBlocks; ++n) {
      const float4 x = from[32 * (g * C::Keys::kBlocks + n)];
      sums[g][n][0] += x.x;
      sums[g][n][1] += x.y;
      sums[g][n][2] += x.z;
      sums[g][n][3] += x.w;
    }
  }
}

// dK or dV of the CTA's keys.
template <class C>
__device__ inline void store_keys(const Params& p, const Work& w, const typename C::Keys::Sums& sums, float scale,
                                  const Operand& x, std::int64_t size) {
  if (x.data == nullptr) return;
  store_sums<C, typename C::Keys>(p, sums, scale, x, x.at(w.scores.b, w.scores.k_slot + w.first_key, w.kv_head),
                                  w.k_rows - w.first_key, size);
}

}  // namespace heddle::cuda::sm80::attention_bwd
