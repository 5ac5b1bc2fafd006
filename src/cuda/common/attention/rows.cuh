// The query rows of a thread, in the accumulators of a matrix product.
//
// A row of the accumulators of mma.sync and wgmma lies in four neighbouring lanes, a quad; the eight quads of a warp
// have eight rows side by side, and the rows that lie 8 further. So a thread has parts of two rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace heddle::cuda {

// Statistics of a thread's two rows over the keys met so far. max is in units of the kernel's logits, after the scale;
// sum counts this thread's columns only.
struct RowState {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};
};

// Of what the four threads of a quad have of a row. The whole warp.
__device__ inline float sum_of_quad(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}
__device__ inline float largest_of_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// The bits that are set in this lane's place of some quad: of keys, those that some of the warp's rows attends. The
// whole warp.
__device__ inline std::uint32_t any_of_quads(std::uint32_t bits) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) bits |= __shfl_xor_sync(0xffffffff, bits, lanes);
  return bits;
}

// Which keys any of the warp's rows attends, those whose score is not -inf: bit 2 n + c for this lane's column c of
// block n. The whole warp.
template <int kGroups, int kBlocks>
__device__ inline std::uint32_t attended_keys(const float (&s)[kGroups][kBlocks][4]) {
  std::uint32_t attended = 0;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      bool any = false;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) any |= s[g][n][c] != -INFINITY || s[g][n][2 + c] != -INFINITY;
      attended |= static_cast<std::uint32_t>(any) << (2 * n + c);
    }
  }
  return any_of_quads(attended);
}

// A word whose low and high half are all ones where bit 0 and bit 1 are set: keeps those of two 16-bit numbers.
__device__ inline std::uint32_t halves(std::uint32_t bits) {
  return ((bits & 1) != 0 ? 0x0000ffffu : 0) | ((bits & 2) != 0 ? 0xffff0000u : 0);
}

// Masking selects: whatever a masked score was, NaN included, it becomes -inf. Of one row, whose keys are the `length`
// from `begin` on. score(n): the address of this thread's scores of keys `key` + 8 n and the next, n < kBlocks.
template <int kBlocks, class Score>
__device__ __forceinline__ void keep_keys(int begin, unsigned length, int key, const Score& score) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    const auto from = static_cast<unsigned>(key + 8 * n - begin);
    float* const x = score(n);
    if (from >= length) x[0] = -INFINITY;
    if (from + 1 >= length) x[1] = -INFINITY;
  }
}

}  // namespace heddle::cuda
