// What rungs 4 and 5 share: a warp that owns 32 query rows, and does both products on tensor cores with mma.sync.
#pragma once

#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "ladder.cuh"

namespace ladder {

namespace ptx = heddle::cuda::ptx;

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kGroups = 2;  // of 16 rows, the M of mma.m16n8k16, a warp
constexpr int kRows = 16 * kGroups * kWarps, kKeys = 64;

// Rows start in different banks: the eight rows that ldmatrix reads at once, 16 bytes each, meet all of them.
template <int kTileRows>
struct Tile {
  bf16 row[kTileRows][kSize + 8];
};
constexpr int kPitch = sizeof(Tile<1>);

// Tiles are moved in pieces of 16 bytes, kPassRows rows at a time; a thread's first piece:
constexpr int kPassRows = kThreads / (kSize / 8);
__device__ inline int thread_row() { return static_cast<int>(threadIdx.x) / (kSize / 8); }
__device__ inline int thread_column() { return static_cast<int>(threadIdx.x) % (kSize / 8) * 8; }

class MmaRows {
 public:
  __device__ MmaRows(const Problem& problem, int block_row)
      : p(problem), lane(threadIdx.x % 32), warp_row(threadIdx.x / 32 * 16 * kGroups), first_row(block_row + warp_row) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) maximum[g][0] = maximum[g][1] = -INFINITY;
  }

  // One tile of keys and values. A lane's scores s[g][n][2 r + c] are those of row 16 g + 8 r + lane / 4 and of key
  // 8 n + 2 (lane % 4) + c; after rounding they are the left operand of P V without moving.
  __device__ void step(const Tile<kRows>& q, const Tile<kKeys>& k, const Tile<kKeys>& v, int first_key) {
    float s[kGroups][kKeys / 8][4] = {};
    const std::uint32_t q_at = address(q, warp_row + lane % 16, lane / 16 * 8);
    const std::uint32_t k_at = address(k, lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
    const std::uint32_t v_at = address(v, lane % 16, lane / 16 * 8);
#pragma unroll 1  // unrolled, it is a few registers short
    for (int d = 0; d < kSize; d += 16) {
      std::uint32_t left[kGroups][4], right[4];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) ptx::load_matrix_x4(left[g], q_at + 16 * g * kPitch + 2 * d);
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        ptx::load_matrix_x4(right, k_at + 8 * n * kPitch + 2 * d);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          ptx::mma_16816<bf16>(s[g][n], left[g], right[0], right[1]);
          ptx::mma_16816<bf16>(s[g][n + 1], left[g], right[2], right[3]);
        }
      }
    }
    if (p.causal && first_key + kKeys > first_row) mask(first_key, s);
    rescale(s);
#pragma unroll
    for (int j = 0; j < kKeys; j += 16) {
      std::uint32_t left[kGroups][4], right[4];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // a pair of neighbouring keys of one row
          float* x = &s[g][j / 8 + i / 2][i % 2 * 2];
          x[0] = ptx::exp2_approx(fmaf(x[0], kScaleLog2, -maximum[g][i % 2]));
          x[1] = ptx::exp2_approx(fmaf(x[1], kScaleLog2, -maximum[g][i % 2]));
          sum[g][i % 2] += x[0] + x[1];  // of this lane's keys, until the end
          left[g][i] = ptx::pack2<bf16>(x[0], x[1]);
        }
      }
#pragma unroll
      for (int n = 0; n < kSize / 8; n += 2) {
        ptx::load_matrix_x4_transposed(right, v_at + j * kPitch + 16 * n);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          ptx::mma_16816<bf16>(o[g][n], left[g], right[0], right[1]);
          ptx::mma_16816<bf16>(o[g][n + 1], left[g], right[2], right[3]);
        }
      }
    }
  }

  __device__ void store(std::int64_t head) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float all = sum[g][r];
        all += __shfl_xor_sync(0xffffffff, all, 1);
        all += __shfl_xor_sync(0xffffffff, all, 2);
        const float inverse = 1.0f / all;
        auto* to = reinterpret_cast<std::uint32_t*>(p.o + head + (first_row + lane / 4 + 16 * g + 8 * r) * kStride +
                                                    lane % 4 * 2);
#pragma unroll
        for (int n = 0; n < kSize / 8; ++n)
          to[4 * n] = ptx::pack2<bf16>(o[g][n][2 * r] * inverse, o[g][n][2 * r + 1] * inverse);
      }
    }
  }

 private:
  template <int kTileRows>
  __device__ static std::uint32_t address(const Tile<kTileRows>& tile, unsigned row, unsigned column) {
    return ptx::shared_address(&tile) + row * kPitch + column * sizeof(bf16);
  }

  __device__ void mask(int first_key, float (&s)[kGroups][kKeys / 8][4]) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = first_key + 8 * n + static_cast<int>(lane % 4) * 2 + i % 2;
          if (key > first_row + static_cast<int>(lane / 4) + 16 * g + i / 2 * 8) s[g][n][i] = -INFINITY;
        }
      }
    }
  }

  // Maxima of the rows, which four lanes share, and what was summed so far relative to them.
  __device__ void rescale(float (&s)[kGroups][kKeys / 8][4]) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) top = fmaxf(top, fmaxf(s[g][n][2 * r], s[g][n][2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
        top = fmaxf(maximum[g][r], top * kScaleLog2);
        const float keep = ptx::exp2_approx(maximum[g][r] - top);
        maximum[g][r] = top;
        sum[g][r] *= keep;
#pragma unroll
        for (int n = 0; n < kSize / 8; ++n) o[g][n][2 * r] *= keep, o[g][n][2 * r + 1] *= keep;
      }
    }
  }

  const Problem& p;
  const unsigned lane, warp_row;
  const int first_row;  // lane / 4 + 8 r is this lane's in a group
  float o[kGroups][kSize / 8][4] = {}, maximum[kGroups][2], sum[kGroups][2] = {};
};

}  // namespace ladder
