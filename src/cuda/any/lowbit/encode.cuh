// Quantisation: a team of threads takes a group of weights that share a scale, 16 columns to a thread at a time.
//   encode_groups_kernel   a group is in its team's registers, and the rule has one scale for it
//   encode_any_kernel      any group, any rule: weights are read again for every step
#pragma once

#include <cstdint>

#include "cuda/any/lowbit/elements.cuh"
#include "cuda/any/lowbit/launch.h"
#include "cuda/any/lowbit/pieces.cuh"
#include "lowbit/scale_rules.h"

namespace heddle::cuda::any::lowbit {

using heddle::lowbit::Matrix;
using heddle::lowbit::QuantizeProblem;
using heddle::lowbit::Range;
using heddle::lowbit::ScaleCandidate;
using heddle::lowbit::ScaleType;

constexpr int kColumns = 16;  // of a thread at a time

template <Element kElement>
__device__ inline void widen(Range& range, bool zero_points, const float (&w)[kColumns]) {
  if (kElement == Element::int4 && zero_points) {
#pragma unroll
    for (const float x : w) range.low = smaller(range.low, x), range.high = larger(range.high, x);
    return;
  }
#pragma unroll
  for (const float x : w) range.high = larger(range.high, fabsf(x));
}
__device__ inline Range joined(const Range& x, const Range& y) {
  return {smaller(x.low, y.low), larger(x.high, y.high)};
}
__device__ inline Range from_lane(const Range& x, int other) {
  return {__shfl_xor_sync(0xffffffff, x.low, other), __shfl_xor_sync(0xffffffff, x.high, other)};
}
// Bits of the largest magnitude that the range has seen.
__device__ inline std::uint32_t largest_in(const Range& range) {
  return __float_as_uint(larger(range.high, -range.low)) & 0x7fffffffu;
}

// The largest `bits` of all threads of the grid, to *largest.
__device__ inline void find_largest(std::uint32_t bits, std::uint32_t* largest) {
  __shared__ std::uint32_t of_block;
  if (threadIdx.x == 0) of_block = 0;
  __syncthreads();
  bits = __reduce_max_sync(0xffffffff, bits);
  if (threadIdx.x % 32 == 0) atomicMax(&of_block, bits);
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(largest, of_block);
}

// The one scale of the whole matrix, which thread 0 leaves in its place.
__device__ inline float global_scale(const QuantizeProblem& p, const Scratch* scratch) {
  if (!p.out.format.global_scale) return 0.0f;
  float scale = p.global_scale;
  if (scale == 0.0f) scale = heddle::lowbit::own_global_scale(p.rule, __uint_as_float(scratch->largest));
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.out.global_scale = scale;
  return scale;
}

__device__ inline void store_scale(const Matrix& out, std::int64_t index, const ScaleCandidate& found) {
  if (out.format.scale == ScaleType::f32) {
    static_cast<std::uint32_t*>(out.scales)[index] = found.stored;
  } else if (out.format.scale == ScaleType::f16) {
    static_cast<std::uint16_t*>(out.scales)[index] = static_cast<std::uint16_t>(found.stored);
  } else {
    static_cast<std::uint8_t*>(out.scales)[index] = static_cast<std::uint8_t>(found.stored);
  }
  if (out.format.zero_points) out.zeros[index] = static_cast<std::uint8_t>(found.zero);
}

// Codes of columns k to k + count - 1; wide: rows of codes begin at multiples of what 16 columns have of them.
template <Element kElement>
__device__ inline void store_codes(const Matrix& out, bool wide, std::int64_t n, std::int64_t k, int count,
                                   const float (&w)[kColumns], const Coder<kElement>& coder) {
  constexpr int kBits = heddle::lowbit::bits_of(kElement), kWords = kColumns * kBits / 32;
  std::uint32_t words[kWords] = {};
  if constexpr (kElement == Element::e2m1) {
    words[0] = coder.eight(w);
    words[1] = coder.eight(w + 8);
  } else {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) words[j * kBits / 32] |= coder.code(w[j]) << j * kBits % 32;
  }
  std::uint8_t* const to = out.codes + n * out.row_bytes + k * kBits / 8;
  if (wide && count == kColumns) {
    if (kBits == 4 && out.format.high_nibble_first) {
#pragma unroll
      for (std::uint32_t& word : words) word = (word & 0x0f0f0f0fu) << 4 | (word >> 4 & 0x0f0f0f0fu);
    }
    if constexpr (kWords == 2) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    return;
  }
#pragma unroll
  for (int byte = 0; byte < kWords * 4; ++byte) {
    const int first = byte * 8 / kBits;
    if (first >= count) break;
    std::uint32_t codes = words[byte / 4] >> byte % 4 * 8 & 255u;
    if (kBits == 4 && first + 1 >= count) codes &= 15u;  // an odd last one has code 0 beside it
    if (kBits == 4 && out.format.high_nibble_first) codes = (codes << 4 | codes >> 4) & 255u;
    to[byte] = static_cast<std::uint8_t>(codes);
  }
}

// The one scale that a rule without a search has. E4M3 scales take their instruction where there is one, and a quotient
// by 6 times the global scale as in Coder<e2m1>.
class OnlyScale {
 public:
  __device__ OnlyScale(const QuantizeProblem& p, float global)
      : p_(p), global_(global), divisor_(6.0f * global), inverse_(1.0f / divisor_) {
#if __CUDA_ARCH__ >= 890
    quick_ = p.out.format.scale == ScaleType::e4m3 && global >= 0x1p-90f && global <= 0x1p90f;
#endif
  }
  __device__ ScaleCandidate operator()(const Range& range) const {
#if __CUDA_ARCH__ >= 890
    if (quick_) {
      float q = range.high * inverse_;
      q = __fmaf_rn(__fmaf_rn(-divisor_, q, range.high), inverse_, q);
      q = __fmaf_rn(__fmaf_rn(-divisor_, q, range.high), inverse_, q);
      const std::uint32_t bits = ptx::float_to_e4m3(q);
      return {bits, ptx::unpack2<__half>(ptx::e4m3x2_to_f16x2(bits)).x * global_};
    }
#endif
    return heddle::lowbit::scale_candidate(p_.out.format, p_.rule, range, global_, 0);
  }

 private:
  const QuantizeProblem& p_;
  float global_, divisor_, inverse_;
  bool quick_ = false;
};

// Rows are a multiple of the group, and a group is 16 times its team's threads, 2^team_bits, up to 32.
template <Element kElement>
__global__ void __launch_bounds__(kThreads)
    encode_groups_kernel(const __grid_constant__ QuantizeProblem p, Scratch* scratch, int team_bits, bool backwards) {
  __shared__ float table[16];
  fill_table<kElement>(table);
  const float global = global_scale(p, scratch);
  const bool zero_points = p.out.format.zero_points, own = p.out.format.global_scale && p.global_scale == 0.0f;
  const OnlyScale only_scale(p, global);
  const int team = 1 << team_bits, lane = static_cast<int>(threadIdx.x) & (team - 1);
  std::uint32_t most = 0;
  for (Units units(p.out.N, static_cast<int>(p.out.K / kColumns)); __any_sync(0xffffffff, units.left()); units.next()) {
    const bool here = units.left();
    const UnitAt at = *units;
    const std::int64_t n = backwards ? p.out.N - 1 - at.row : at.row, k = std::int64_t{at.unit} * kColumns;
    float w[kColumns];
    load_weights(p.weights, true, n, k, here ? kColumns : 0, w);
    Range range;
    widen<kElement>(range, zero_points, w);
    if (!own) most = max(most, largest_in(range));
    for (int other = 1; other < team; other *= 2) range = joined(range, from_lane(range, other));
    if (!here) continue;
    const ScaleCandidate found = only_scale(range);
    store_codes(p.out, true, n, k, kColumns, w, Coder<kElement>(found.scale, found.zero, table));
    if (lane == 0) store_scale(p.out, n * p.out.groups + (at.unit >> team_bits), found);
  }
  if (!own) find_largest(most, &scratch->largest);
}

// What a lane of a search has found: the least error, and of equal ones the first candidate.
struct Best {
  double error = 0.0;
  int candidate = 0;
};
// In the order of the candidates a later one is taken if its error is less. So a NaN is never taken but as the first of
// all, after which nothing is less.
__device__ inline bool better(const Best& x, const Best& y) {
  if (isnan(y.error)) return !isnan(x.error) && y.candidate != 0;
  if (isnan(x.error)) return x.candidate == 0;
  return x.error < y.error || (x.error == y.error && x.candidate < y.candidate);
}
__device__ inline Best joined(const Best& x, const Best& y) { return better(y, x) ? y : x; }
__device__ inline Best from_lane(const Best& x, int other) {
  return {__shfl_xor_sync(0xffffffff, x.error, other), __shfl_xor_sync(0xffffffff, x.candidate, other)};
}

// Of all threads of a team, in every one of them. A team has lanes of one warp, or the whole block.
template <class Value>
__device__ inline Value over_team(Value value, int team) {
  __shared__ alignas(Value) unsigned char memory[sizeof(Value) * kThreads / 32];
  for (int other = 1; other < team && other < 32; other *= 2) value = joined(value, from_lane(value, other));
  if (team <= 32) return value;
  auto* const of_warp = reinterpret_cast<Value*>(memory);
  __syncthreads();  // what an earlier call has left was read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < kThreads / 32; ++warp) value = joined(value, of_warp[warp]);
  return value;
}

// The squared error of a candidate over columns [k, end) of row n, summed in the order of the columns. All lanes of a
// team read the same weights: one at a time is what the cache gives them.
template <Element kElement>
__device__ inline double squared_error(const QuantizeProblem& p, std::int64_t n, std::int64_t k, std::int64_t end,
                                       const ScaleCandidate& candidate, const float* table) {
  const Coder<kElement> coder(candidate.scale, candidate.zero, table);
  double sum = 0.0;
#pragma unroll 1
  for (; k < end; ++k) {
    const float w = load_weight(p.weights, n, k);
    const float difference = __fmaf_rn(-coder.value(coder.code(w)), candidate.scale, w);
    const float weighed = p.importance != nullptr ? __fmul_rn(p.importance[k], difference) : difference;
    sum = __fma_rn(static_cast<double>(weighed), static_cast<double>(difference), sum);
  }
  return sum;
}

template <Element kElement>
__global__ void __launch_bounds__(kThreads)
    encode_any_kernel(const __grid_constant__ QuantizeProblem p, Scratch* scratch, int team, Wide wide) {
  __shared__ float table[16];
  fill_table<kElement>(table);
  const Matrix& out = p.out;
  const float global = global_scale(p, scratch);
  const bool zero_points = out.format.zero_points, own = out.format.global_scale && p.global_scale == 0.0f;
  const int lane = static_cast<int>(threadIdx.x) % team;
  const std::int64_t groups = out.N * out.groups, teams = std::int64_t{gridDim.x} * (kThreads / team);
  const std::int64_t first = std::int64_t{blockIdx.x} * (kThreads / team) + threadIdx.x / team;
  std::uint32_t most = 0;
  // All lanes of a warp go round as often as the first: they work together.
  for (std::int64_t g = first; g - threadIdx.x % 32 / team < groups; g += teams) {
    const std::int64_t index = min(g, groups - 1), n = index / out.groups, begin = index % out.groups * out.group;
    const std::int64_t end = min(begin + out.group, out.K);
    const auto for_each_piece = [&](auto visit) {
#pragma unroll 1
      for (std::int64_t k = begin + lane * kColumns; k < end; k += team * kColumns) {
        float w[kColumns];
        const int count = static_cast<int>(min(end - k, std::int64_t{kColumns}));
        load_weights(p.weights, wide.weights, n, k, count, w);
        visit(k, count, w);
      }
    };
    Range range;
    for_each_piece([&](std::int64_t, int, const float(&w)[kColumns]) { widen<kElement>(range, zero_points, w); });
    if (!own) most = max(most, largest_in(range));
    range = over_team(range, team);
    const int count = heddle::lowbit::candidate_count(out.format, p.rule, range);
    int chosen = 0;
    if (heddle::lowbit::searches(p.rule)) {
      Best best{INFINITY, heddle::lowbit::kMaxCandidates};
#pragma unroll 1
      for (int c = lane; c < count; c += team) {
        const ScaleCandidate candidate = heddle::lowbit::scale_candidate(out.format, p.rule, range, global, c);
        best = joined(best, {squared_error<kElement>(p, n, begin, end, candidate, table), c});
      }
      chosen = over_team(best, team).candidate;
    }
    const ScaleCandidate found = heddle::lowbit::scale_candidate(out.format, p.rule, range, global, chosen);
    if (g >= groups) continue;
    const Coder<kElement> coder(found.scale, found.zero, table);
    for_each_piece([&](std::int64_t k, int columns, const float(&w)[kColumns]) {
      store_codes(out, wide.codes, n, k, columns, w, coder);
    });
    if (lane == 0) store_scale(out, index, found);
  }
  if (!own) find_largest(most, &scratch->largest);
}

}  // namespace heddle::cuda::any::lowbit
