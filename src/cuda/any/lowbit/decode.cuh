// What quantised weights stand for, eight columns to a thread.
#pragma once

#include <cstdint>

#include "cuda/any/lowbit/elements.cuh"
#include "cuda/any/lowbit/launch.h"
#include "cuda/any/lowbit/pieces.cuh"

namespace heddle::cuda::any::lowbit {

using heddle::lowbit::Matrix;
using heddle::lowbit::ScaleType;

__device__ inline float load_scale(const Matrix& m, std::int64_t index) {
  if (m.format.scale == ScaleType::f32) return static_cast<const float*>(m.scales)[index];
  if (m.format.scale == ScaleType::f16) return __half2float(static_cast<const __half*>(m.scales)[index]);
  const std::uint8_t bits = static_cast<const std::uint8_t*>(m.scales)[index];
  if (m.format.scale == ScaleType::e8m0) return heddle::lowbit::E8M0{bits}.value();
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3)));
}

// Of eight columns from k on, words of kBits codes each, the first in the lowest bits.
template <int kBits>
__device__ inline void load_codes(const Matrix& m, bool wide, std::int64_t n, std::int64_t k, int count,
                                  std::uint32_t (&words)[kBits / 4]) {
  const std::uint8_t* const from = m.codes + n * m.row_bytes + k * kBits / 8;
  if (wide && count == 8) {
    if constexpr (kBits == 4) {
      words[0] = __ldg(reinterpret_cast<const std::uint32_t*>(from));
    } else {
      const uint2 two = __ldg(reinterpret_cast<const uint2*>(from));
      words[0] = two.x, words[1] = two.y;
    }
  } else {
#pragma unroll
    for (std::uint32_t& word : words) word = 0;
#pragma unroll
    for (int byte = 0; byte < kBits; ++byte) {
      if (byte * 8 / kBits < count) words[byte / 4] |= std::uint32_t{from[byte]} << byte % 4 * 8;
    }
  }
  if (kBits == 4 && m.format.high_nibble_first) {
    words[0] = (words[0] & 0x0f0f0f0fu) << 4 | (words[0] >> 4 & 0x0f0f0f0fu);
  }
}

// Eight columns of a row, from their loading to their storing.
template <Element kElement>
struct Eight {
  static constexpr int kBits = heddle::lowbit::bits_of(kElement), kColumns = 8;

  __device__ void load(const Matrix& m, bool wide, const UnitAt& at, int group_shift, float global) {
    n = at.row, k = std::int64_t{at.unit} * kColumns;
    count = static_cast<int>(min(m.K - k, std::int64_t{kColumns}));
    load_codes<kBits>(m, wide, n, k, count, words);
    const std::int64_t group = n * m.groups + (k >> group_shift);
    scale = load_scale(m, group);
    if (m.format.global_scale) scale *= global;
    zero = m.format.zero_points ? static_cast<float>(m.zeros[group]) : heddle::lowbit::kInt4Zero;
  }
  __device__ void store(const Weights& to, bool wide, const float* table) const {
    float w[kColumns];
    if constexpr (kElement == Element::e2m1 || kElement == Element::e2m1_row) {
      Coder<Element::e2m1>::eight_values(words[0], w);
#pragma unroll
      for (float& x : w) x = __fmul_rn(x, scale);
    } else {
      const Coder<kElement> coder(scale, zero, table);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const unsigned code = words[j * kBits / 32] >> j * kBits % 32 & ((1u << kBits) - 1);
        w[j] = __fmul_rn(coder.value(code), scale);
      }
    }
    store_eight(to, wide, n, k, count, w);
  }

  std::int64_t n, k;
  int count;
  std::uint32_t words[kBits / 4];
  float scale, zero;
};

// group_shift: log2 of the group; of one scale a row, more than any column has. Two units are loaded before either is
// stored, so that memory has more to do.
template <Element kElement>
__global__ void __launch_bounds__(kThreads)
    decode_matrix_kernel(const __grid_constant__ Matrix m, const __grid_constant__ Weights to, int group_shift,
                         Wide wide) {
  __shared__ float table[16];
  fill_table<kElement>(table);
  const float global = m.format.global_scale ? *m.global_scale : 1.0f;
  for (Units units(m.N, static_cast<int>((m.K + 7) / 8)); units.left(); units.next()) {
    Eight<kElement> first, second;
    first.load(m, wide.codes, *units, group_shift, global);
    units.next();
    const bool both = units.left();
    if (both) second.load(m, wide.codes, *units, group_shift, global);
    first.store(to, wide.weights, table);
    if (both) second.store(to, wide.weights, table);
  }
}

}  // namespace heddle::cuda::any::lowbit
