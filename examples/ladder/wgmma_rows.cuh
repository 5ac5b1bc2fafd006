// A warpgroup of rung 6, which owns 64 query rows: its two products and its softmax.
#pragma once

#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/wgmma.cuh"
#include "ladder.cuh"

namespace ladder {

namespace ptx = heddle::cuda::ptx;
using heddle::cuda::Swizzled128;
using Multiply = heddle::cuda::Wgmma<bf16, 128>;

constexpr int kRows = 128, kKeys = 128, kStages = 2, kThreads = 3 * 128;

// Two panels of 64 columns, as the 128-byte swizzle has them.
struct alignas(1024) Tile {
  bf16 panel[2][128][64];
};
constexpr std::uint32_t kPanelBytes = sizeof(Tile) / 2;

struct SharedMemory {
  Tile q, k[kStages], v[kStages];
  ptx::Barrier q_ready, k_ready[kStages], v_ready[kStages], k_free[kStages], v_free[kStages];
};

// 64 rows. A thread holds rows `row` and row + 8 of S and O: elements 4 j, 4 j + 1 and 4 j + 2, 4 j + 3.
struct Consumer {
  SharedMemory& shared;
  const int row;  // in the block
  float s[64], o[64], maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {}, keep[2];
  std::uint32_t probabilities[8][4];

  __device__ void issue_scores(int tile) {
    const Swizzled128 q(&shared.q.panel[0][row / 64 * 64]), k(&shared.k[tile % kStages]);
    ptx::barrier_wait(shared.k_ready[tile % kStages], tile / kStages % 2);
    heddle::cuda::wgmma_fence();
#pragma unroll
    for (int d = 0; d < 8; ++d) {
      const std::uint32_t bytes = d / 4 * kPanelBytes + d % 4 * 32;
      Multiply::shared_shared(s, q.at(bytes), k.at(bytes), d > 0);
    }
    heddle::cuda::wgmma_commit();
  }

  __device__ void issue_output(int tile) {
    const Swizzled128 v(&shared.v[tile % kStages], kPanelBytes);
    ptx::barrier_wait(shared.v_ready[tile % kStages], tile / kStages % 2);
    heddle::cuda::wgmma_fence();
#pragma unroll
    for (int j = 0; j < 8; ++j) Multiply::registers_shared<true>(o, probabilities[j], v.at(j * 2048), true);
    heddle::cuda::wgmma_commit();
  }

  // last_key: the last that `row` attends, counted from this lane's first column.
  __device__ void softmax(int first_key, int last_key, bool masked) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = -INFINITY;
#pragma unroll
      for (int i = 2 * r; i < 64; i = i % 2 == 0 ? i + 1 : i + 3) {
        if (masked && first_key + i / 4 * 8 + i % 2 > last_key + 8 * r) s[i] = -INFINITY;
        top = fmaxf(top, s[i]);
      }
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
      top = fmaxf(maximum[r], top * kScaleLog2);
      keep[r] = ptx::exp2_approx(maximum[r] - top);
      maximum[r] = top;
      sum[r] *= keep[r];
#pragma unroll
      for (int i = 2 * r; i < 64; i = i % 2 == 0 ? i + 1 : i + 3) {
        sum[r] += s[i] = ptx::exp2_approx(fmaf(s[i], kScaleLog2, -top));
      }
    }
  }

  __device__ void round_probabilities() {
#pragma unroll
    for (int i = 0; i < 32; ++i) probabilities[i / 4][i % 4] = ptx::pack2<bf16>(s[2 * i], s[2 * i + 1]);
  }
};

}  // namespace ladder
