// Means of K, then codes and scales of K and q: two passes bound by memory. kPitch: bytes of a row of codes, 64 or
// 128.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>

#include "cuda/any/attention_int8_qk/params.h"

namespace heddle::cuda::any::attention_int8_qk {

constexpr int kPiece = 8;  // elements that a lane reads, and codes that it writes, at once

template <class T>
struct alignas(16) Piece {
  T element[kPiece] = {};
};

__device__ inline bool finite(float x) { return fabsf(x) <= FLT_MAX; }

// A batch and a head of K.
struct KeyHead {
  int b, h, keys;
  std::int64_t first;  // row of key 0
  const std::byte* data;

  __device__ KeyHead(const Params& params, unsigned unit)
      : b(static_cast<int>(params.kv_heads.quotient(unit))), h(static_cast<int>(unit - b * params.kv_heads.divisor)) {
    const AttentionProblem& p = params.problem;
    const Sequence s = p.stored_sequence(b);
    keys = static_cast<int>(keys_of(p, s));
    first = s.k_begin;
    data = p.k.at(b, first, h);
  }
  template <class T>
  __device__ const T* row(const Params& params, int j) const {
    return reinterpret_cast<const T*>(data) + j * params.problem.k.stride_s;
  }
};

// A channel's mean over finite elements of the sampled keys, always added up in the same order. Any number will do, as
// far as softmax is concerned; an infinite one will not.
template <class T, int kPitch>
__global__ void __launch_bounds__(256) mean_keys_kernel(const __grid_constant__ Params params) {
  constexpr int kPieces = kPitch / kPiece, kRows = 256 / kPieces;
  __shared__ float sums[kRows][kPitch];
  const KeyHead head(params, blockIdx.x);
  const int count = min(head.keys, kSampledKeys);
  const int row = static_cast<int>(threadIdx.x) / kPieces, column = static_cast<int>(threadIdx.x) % kPieces * kPiece;
  float sum[kPiece] = {};
  if (column < params.problem.D) {
#pragma unroll 8
    for (int n = row; n < count; n += kRows) {
      const int j = static_cast<int>(sampled_key(n, head.keys));
      const auto x = *reinterpret_cast<const Piece<T>*>(head.row<T>(params, j) + column);
#pragma unroll
      for (int d = 0; d < kPiece; ++d) {
        const auto value = static_cast<float>(x.element[d]);
        sum[d] += finite(value) ? value : 0.0f;
      }
    }
  }
#pragma unroll
  for (int d = 0; d < kPiece; ++d) sums[row][column + d] = sum[d];
  __syncthreads();
  if (threadIdx.x < kPitch) {
    float total = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) total += sums[r][threadIdx.x];
    const float mean = total / static_cast<float>(max(count, 1));
    params.codes.means[blockIdx.x * std::int64_t{kPitch} + threadIdx.x] = finite(mean) ? mean : 0.0f;
  }
}

// Eight codes, to nearest, of numbers whose magnitude times `inverse` is at most 127. A sum with 1.5 * 2^23 has the
// integer in its lowest bits.
__device__ inline uint2 codes_of(const float (&x)[kPiece], float inverse) {
  const auto code = [&](int n) { return __float_as_uint(fmaf(x[n], inverse, 0x1.8p23f)); };
  const auto four = [&](int n) {
    return __byte_perm(__byte_perm(code(n), code(n + 1), 0x0040), __byte_perm(code(n + 2), code(n + 3), 0x0040),
                       0x5410);
  };
  return {four(0), four(4)};
}

// Which of a warp's rows, kPieces lanes each, has a lane that says yes: bit r for row r.
template <int kPieces>
__device__ inline std::uint32_t rows_that(bool any) {
  const std::uint32_t lanes = __ballot_sync(0xffffffff, any);
  std::uint32_t rows = 0;
#pragma unroll
  for (int r = 0; r < 32 / kPieces; ++r) {
    rows |= static_cast<std::uint32_t>((lanes >> (r * kPieces) & ((1u << kPieces) - 1)) != 0) << r;
  }
  return rows;
}

// Scales are never 0: codes of zeros are divided by them, and minus infinity is multiplied with them.
__device__ inline float scale_of(float largest) { return fmaxf(largest * (1.0f / kLargestCode), FLT_MIN); }

// Four warps for rows of 64 bytes, eight for 128: a lane then has four pieces, and registers leave room for many warps.
constexpr int threads_for(int pitch) { return 2 * pitch; }

// 64 keys; one warp, or two, for each group.
template <class T, int kPitch>
__device__ void quantize_keys(const Params& params, unsigned block_of_all) {
  constexpr int kPieces = kPitch / kPiece, kRows = 32 / kPieces, kParts = threads_for(kPitch) / 32 / kGroups;
  constexpr int kPasses = kGroupKeys / kRows / kParts;
  __shared__ KeyGroup found[kParts][kGroups];  // largest magnitude, not yet a scale
  const Codes& c = params.codes;
  const unsigned unit = params.blocks.quotient(block_of_all);
  const int first = static_cast<int>(block_of_all - unit * params.blocks.divisor) * kBlockKeys;
  const KeyHead head(params, unit);
  if (first >= head.keys) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int group = warp % kGroups, part = warp / kGroups;
  const int column = lane % kPieces * kPiece, rest = min(head.keys - first, kBlockKeys);
  // In the group, as its bit is.
  const auto index = [&](int pass) { return (part * kPasses + pass) * kRows + lane / kPieces; };
  const auto key = [&](int pass) { return index(pass) / 2 * 8 + 2 * group + index(pass) % 2; };
  Piece<T> k[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    k[pass] = {};
    if (key(pass) < rest && column < params.problem.D) {
      k[pass] = *reinterpret_cast<const Piece<T>*>(head.row<T>(params, first + key(pass)) + column);
    }
  }
  float mean[kPiece];
#pragma unroll
  for (int n = 0; n < kPiece; ++n) mean[n] = c.means[unit * std::int64_t{kPitch} + column + n];
  // Less the mean; 0 where there is no key.
  const auto smoothed = [&](int pass, float(&x)[kPiece]) {
#pragma unroll
    for (int n = 0; n < kPiece; ++n) x[n] = key(pass) < rest ? static_cast<float>(k[pass].element[n]) - mean[n] : 0.0f;
  };
  float largest = 0;
  std::uint32_t bad = 0;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    float x[kPiece], top = 0;
    smoothed(pass, x);
    bool all_finite = true;
#pragma unroll
    for (int n = 0; n < kPiece; ++n) {
      top = fmaxf(top, fabsf(x[n]));
      all_finite &= finite(x[n]);
    }
    bad |= rows_that<kPieces>(!all_finite) << ((part * kPasses + pass) * kRows);
    if ((bad >> index(pass) & 1) == 0) largest = fmaxf(largest, top);
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, lanes));
  if (lane == 0) found[part][group] = {largest, bad};
  __syncthreads();
#pragma unroll
  for (int other = 0; other < kParts; ++other) {
    largest = fmaxf(largest, found[other][group].scale);
    bad |= found[other][group].bad;
  }
  const float scale = scale_of(largest), inverse = 1.0f / scale;
  std::byte* const to =
      c.k.data + (head.b * c.k.stride_b + head.h * c.k.stride_h) + (head.first + first) * kPitch + column;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    float x[kPiece];
    smoothed(pass, x);
    const bool good = (bad >> index(pass) & 1) == 0;
    if (key(pass) < rest) *reinterpret_cast<uint2*>(to + key(pass) * kPitch) = good ? codes_of(x, inverse) : uint2{};
  }
  if (lane == 0 && part == 0) c.groups[std::int64_t{block_of_all} * kGroups + group] = {scale, bad};
}

// 64 rows of q.
template <class T, int kPitch>
__device__ void quantize_queries(const Params& params, unsigned block_of_all) {
  constexpr int kPieces = kPitch / kPiece, kRows = 32 / kPieces, kWarpRows = kBlockRows * 32 / threads_for(kPitch);
  constexpr int kPasses = kWarpRows / kRows;
  const AttentionProblem& p = params.problem;
  const Codes& c = params.codes;
  const unsigned unit = params.row_blocks.quotient(block_of_all), b = params.heads.quotient(unit);
  const int h = static_cast<int>(unit - b * params.heads.divisor);
  const Sequence s = p.stored_sequence(b);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int column = lane % kPieces * kPiece, sq = static_cast<int>(s.sq);
  const int first = static_cast<int>(block_of_all - unit * params.row_blocks.divisor) * kBlockRows + warp * kWarpRows +
                    lane / kPieces;
  const T* const from = reinterpret_cast<const T*>(p.q.at(b, s.q_begin, h)) + column;
  Piece<T> q[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    q[pass] = {};
    const int i = first + pass * kRows;
    if (i < sq && column < p.D) q[pass] = *reinterpret_cast<const Piece<T>*>(from + i * p.q.stride_s);
  }
  const float* const mean_of = c.means + (b * p.Hkv + params.group.quotient(h)) * kPitch + column;
  float mean[kPiece];
#pragma unroll
  for (int n = 0; n < kPiece; ++n) mean[n] = mean_of[n];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    float x[kPiece], top = 0, shift = 0;
    bool all_finite = true;
#pragma unroll
    for (int n = 0; n < kPiece; ++n) {
      x[n] = static_cast<float>(q[pass].element[n]);
      top = fmaxf(top, fabsf(x[n]));
      shift = fmaf(x[n], mean[n], shift);
      all_finite &= finite(x[n]);
    }
    const bool good = (rows_that<kPieces>(!all_finite) >> (lane / kPieces) & 1) == 0;
#pragma unroll
    for (int lanes = 1; lanes < kPieces; lanes *= 2) {
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, lanes));
      shift += __shfl_xor_sync(0xffffffff, shift, lanes);
    }
    const int i = first + pass * kRows;
    const std::int64_t row = s.q_begin + i;
    const float scale = scale_of(top);
    if (i < sq) {
      std::byte* const to = c.q.data + (b * c.q.stride_b + h * c.q.stride_h + row * kPitch + column);
      *reinterpret_cast<uint2*>(to) = good ? codes_of(x, 1.0f / scale) : uint2{};
    }
    if (i < sq && column == 0) {
      *c.q_scale.place(b, row, h) = good ? scale * c.scale_log2 : NAN;
      *c.q_shift.place(b, row, h) = good ? shift * c.scale_log2 : 0.0f;
    }
  }
}

template <class T, int kPitch>
__global__ void __launch_bounds__(threads_for(kPitch)) quantize_kernel(const __grid_constant__ Params params) {
  if (blockIdx.x < params.key_launches) {
    quantize_keys<T, kPitch>(params, blockIdx.x);
  } else {
    quantize_queries<T, kPitch>(params, blockIdx.x - params.key_launches);
  }
}

}  // namespace heddle::cuda::any::attention_int8_qk
