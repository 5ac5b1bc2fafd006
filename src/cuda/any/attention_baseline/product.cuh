// C[kRows, kColumns] += A[kRows, kDepth] B, all threads of a block, from tiles in shared memory: tensor cores for
// 16-bit elements, FMA for f32. B lies as keys do, [kColumns, kDepth], or (kTransposed) as values do, [kDepth,
// kColumns].
#pragma once

#include "cuda/any/attention_baseline/tile.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"

namespace heddle::cuda::any::attention_baseline {

// Eight warps, four along the rows; each owns 32 rows and half of the columns.
template <class T, int kColumns, bool kTransposed>
class Product {
 public:
  static constexpr int kDepth = 64;
  using A = Tile<T, kRows, kDepth>;
  using B = Tile<T, kTransposed ? kDepth : kColumns, kTransposed ? kColumns : kDepth>;

  __device__ void step(const A& a, const B& b) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      std::uint32_t left[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        ptx::load_matrix_x4(left[m], &a.row[first_row() + 16 * m + lane % 16][k + lane / 16 * 8]);
      }
#pragma unroll
      for (int n = 0; n < kBlocks; n += 2) {
        std::uint32_t right[4];
        const int column = first_column() + 8 * n;
        if constexpr (kTransposed) {
          ptx::load_matrix_x4_transposed(right, ptx::shared_address(&b.row[k + lane % 16][column + lane / 16 * 8]));
        } else {
          ptx::load_matrix_x4(right, &b.row[column + lane % 8 + lane / 16 * 8][k + lane / 8 % 2 * 8]);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          ptx::mma_16816<T>(c_[m][n], left[m], right[0], right[1]);
          ptx::mma_16816<T>(c_[m][n + 1], left[m], right[2], right[3]);
        }
      }
    }
  }

  // Calls visit(row, column, x, y) for pairs of neighbouring columns.
  template <class Visit>
  __device__ void for_each_pair(Visit visit) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          visit(first_row() + 16 * m + 8 * r + lane / 4, first_column() + 8 * n + lane % 4 * 2, c_[m][n][2 * r],
                c_[m][n][2 * r + 1]);
        }
      }
    }
  }

 private:
  static constexpr int kBlocks = kColumns / 2 / 8;
  __device__ static int first_row() { return static_cast<int>(threadIdx.x) / 32 % 4 * 32; }
  __device__ static int first_column() { return static_cast<int>(threadIdx.x) / 128 * (kColumns / 2); }

  float c_[2][kBlocks][4] = {};
};

// 16 x 16 threads; each owns rows y + 16 i and columns 2 x + 32 j, 2 x + 32 j + 1.
template <int kColumns, bool kTransposed>
class Product<float, kColumns, kTransposed> {
 public:
  static constexpr int kDepth = 32;
  using A = Tile<float, kRows, kDepth>;
  using B = Tile<float, kTransposed ? kDepth : kColumns, kTransposed ? kColumns : kDepth>;

  __device__ void step(const A& a, const B& b) {
    const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
#pragma unroll 1
    for (int k = 0; k < kDepth; k += 2) {
      float2 right[kPairs][2];  // of each column, two steps of the depth
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int column = 2 * x + 32 * j;
        if constexpr (kTransposed) {
          const float2 first = two(&b.row[k][column]), second = two(&b.row[k + 1][column]);
          right[j][0] = make_float2(first.x, second.x);
          right[j][1] = make_float2(first.y, second.y);
        } else {
          right[j][0] = two(&b.row[column][k]);
          right[j][1] = two(&b.row[column + 1][k]);
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 left = two(&a.row[y + 16 * i][k]);
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c)
            c_[i][j][c] = fmaf(left.y, right[j][c].y, fmaf(left.x, right[j][c].x, c_[i][j][c]));
        }
      }
    }
  }

  template <class Visit>
  __device__ void for_each_pair(Visit visit) const {
    const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < kPairs; ++j) visit(y + 16 * i, 2 * x + 32 * j, c_[i][j][0], c_[i][j][1]);
    }
  }

 private:
  static constexpr int kPairs = kColumns / 32;
  __device__ static float2 two(const float* x) { return *reinterpret_cast<const float2*>(x); }

  float c_[8][kPairs][2] = {};
};

}  // namespace heddle::cuda::any::attention_baseline
