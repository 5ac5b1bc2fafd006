// What a warp does with a block of 64 keys in 4 bits. Codes become float16 by one mask: their four bits, at the bottom
// of a half, are a subnormal, code * 2^-24 (or, four bits higher, code * 2^-20), exact, and products take subnormals
// as they are. So nothing is converted: scales of K multiply q, those of V multiply P, and zeros are products of
// their own: of q with K's, once a block, and of P with V's, as if they were two more channels.
#pragma once

#include "cuda/common/attention/exponents.cuh"
#include "cuda/common/attention/rows.cuh"
#include "cuda/sm80/attention_decode/consumer.cuh"
#include "cuda/sm80/attention_decode/int4_config.h"

namespace heddle::cuda::sm80::attention_decode {

namespace detail {

__device__ inline std::uint32_t multiply_halves(std::uint32_t x, std::uint32_t y) {
  const __half2 z = __hmul2(*reinterpret_cast<const __half2*>(&x), *reinterpret_cast<const __half2*>(&y));
  return *reinterpret_cast<const std::uint32_t*>(&z);
}

__device__ inline std::uint32_t both_halves(float x) {
  const __half2 z = __float2half2_rn(x);
  return *reinterpret_cast<const std::uint32_t*>(&z);
}

// The larger of both, half by half; NaN counts for nothing.
__device__ inline std::uint32_t larger_halves(std::uint32_t x, std::uint32_t y) {
  const __half2 z = __hmax2(*reinterpret_cast<const __half2*>(&x), *reinterpret_cast<const __half2*>(&y));
  return *reinterpret_cast<const std::uint32_t*>(&z);
}

// Eight halves, as the codes of a word come out of it: elements (0, 4), (1, 5), (2, 6), (3, 7).
__device__ inline void as_codes_lie(const uint4& eight, std::uint32_t (&pairs)[4]) {
  pairs[0] = __byte_perm(eight.x, eight.z, 0x5410);
  pairs[1] = __byte_perm(eight.x, eight.z, 0x7632);
  pairs[2] = __byte_perm(eight.y, eight.w, 0x5410);
  pairs[3] = __byte_perm(eight.y, eight.w, 0x7632);
}

// The codes of a word: numbers n and n + 4 as halves, times 2^-24 where n is even, 2^-20 where it is odd.
__device__ inline void codes_of(std::uint32_t word, std::uint32_t (&pairs)[4]) {
  pairs[0] = word & 0x000F000Fu;
  pairs[1] = word & 0x00F000F0u;
  pairs[2] = word >> 8 & 0x000F000Fu;
  pairs[3] = word >> 8 & 0x00F000F0u;
}

}  // namespace detail

template <class C>
class Int4Consumer : public Consumer<C> {
  using Base = Consumer<C>;
  using Base::lane, Base::max, Base::o, Base::p, Base::scores, Base::shared, Base::sum, Base::warp;
  using T = typename C::Element;
  using Keys = Int4Keys<C::kHeadSize>;
  static constexpr int kGroups = C::kGroups;
  static constexpr int kLaneDims = C::kHeadSize / 4, kWords = kLaneDims / 8;  // of a key, and their words of codes
  static constexpr float kCodes = 0x1p24f;  // what a product of codes is multiplied with
  static constexpr float kLeastUnit = 0x1p-14f;

 public:
  __device__ Int4Consumer(const Params& params, const Extent& extent, const Segment& segment, SharedMemory<C>& memory)
      : Base(params, extent, segment, memory) {}

  // Between the last keys of the ring and the first block: q as blocks take it. Each row is divided by a power of two
  // that brings its largest element to [1, 2), so that any bfloat16 fits.
  __device__ void take_query() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const T* row = &shared.query().row[lane / 4 + 8 * r][kLaneDims * (lane % 4)];
      float largest = 0.0f;
#pragma unroll
      for (int d = 0; d < kLaneDims; ++d) largest = fmaxf(largest, fabsf(to_float(row[d])));
      largest = largest_of_quad(largest);
      const bool usual = largest > 1e-30f && largest < 1e30f;  // else it stays as it is
      const std::uint32_t exponent = usual ? __float_as_uint(largest) & 0x7F800000u : 0x3F800000u;
      const float shrink = __uint_as_float(0x7F000000u - exponent);
      factor[r] = p.problem.scale * __uint_as_float(exponent) * kCodes;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          q[r][4 * w + n] =
              ptx::pack2<__half>(to_float(row[8 * w + n]) * shrink, to_float(row[8 * w + n + 4]) * shrink);
        }
      }
    }
  }

  // The keys from slot `first` on, which are in a stage.
  __device__ void block(int first, int stage) {
    const Keys& keys = shared.stage[warp][stage].block();
    float x[kBlockTiles][4];
    multiply_keys(keys, x);
#pragma unroll
    for (int n = 0; n < kBlockTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] *= factor[i / 2];
    }
    const bool plain = scores.plain(first, kBlockKeys);
    std::uint32_t attended = 0xFFFFFFFF;  // of this lane's keys, two bits for each eight
    if (!plain) {
      attended = 0;
#pragma unroll
      for (int n = 0; n < kBlockTiles; n += 2) {
        attended |= scores.finish(first + 8 * n, reinterpret_cast<float(&)[2][4]>(x[n])) << (2 * n);
      }
    }
    float correction[2];
    if (Base::update_maxima(x, correction)) {
      Base::scale_output(correction);
#pragma unroll
      for (int i = 0; i < 4; ++i) zero_sum[i] *= correction[i / 2];
    }
    add_values(keys, attended, x);
  }

  // o becomes what it stands for.
  __device__ void finish() {
    const float factors[2] = {unit * kCodes, unit * kCodes};
    Base::scale_output(factors);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i % 2 >= kGroups) continue;
      const float zero = __shfl_sync(0xffffffff, zero_sum[i], lane & ~3u);  // of group i % 2, row i / 2
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) o[8 * (i % 2) + n][i / 2 * 2 + c] += zero;
      }
    }
  }

 private:
  __device__ static std::uint32_t word(const uint4& words, int n) {
    return n == 0 ? words.x : n == 1 ? words.y : n == 2 ? words.z : words.w;
  }

  __device__ static std::uint32_t word(const uint2& words, int n) { return n == 0 ? words.x : words.y; }

  // x = q (zero + code * scale), in units of 2^-24 and of what was taken out of q.
  __device__ void multiply_keys(const Keys& keys, float (&x)[kBlockTiles][4]) const {
    std::uint32_t scaled[2][4 * kWords];
    float zero[4] = {};
    const std::uint32_t sixteenth = detail::both_halves(0x1p-4f);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int d = kLaneDims * static_cast<int>(lane % 4) + 8 * w;
      std::uint32_t scale[4], zeros[4];
      detail::as_codes_lie(*reinterpret_cast<const uint4*>(&keys.k_scale[d]), scale);
      detail::as_codes_lie(*reinterpret_cast<const uint4*>(&keys.k_zero[d]), zeros);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (n % 2 == 1) scale[n] = detail::multiply_halves(scale[n], sixteenth);
#pragma unroll
        for (int r = 0; r < 2; ++r) scaled[r][4 * w + n] = detail::multiply_halves(q[r][4 * w + n], scale[n]);
      }
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        const int at = 4 * w + n;
        const std::uint32_t a[4] = {q[0][at], q[1][at], q[0][at + 1], q[1][at + 1]};
        ptx::mma_16816<__half>(zero, a, zeros[n], zeros[n + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kBlockTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] = zero[i] * (1 / kCodes);
    }
#pragma unroll
    for (int n = 0; n < kBlockTiles; ++n) {
      const auto words = keys.k[n][lane];
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        std::uint32_t codes[4];
        detail::codes_of(word(words, w), codes);
#pragma unroll
        for (int m = 0; m < 4; m += 2) {
          const int at = 4 * w + m;
          const std::uint32_t a[4] = {scaled[0][at], scaled[1][at], scaled[0][at + 1], scaled[1][at + 1]};
          ptx::mma_16816<__half>(x[n], a, codes[m], codes[m + 1]);
        }
      }
    }
  }

  // x: scores, then P. o counts in units of 2^-24 (a code) and of a power of two above the largest scale so far.
  __device__ void add_values(const Keys& keys, std::uint32_t attended, float (&x)[kBlockTiles][4]) {
    std::uint32_t weights[kBlockTiles][2];
#pragma unroll
    for (int n = 0; n < kBlockTiles; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float even = exp_of_difference(x[n][2 * r], max[r]);
        const float odd = exp_of_difference(x[n][2 * r + 1], max[r]);
        sum[r] += even + odd;
        weights[n][r] = ptx::pack2<__half>(even, odd);
      }
    }
    std::uint32_t scale[kGroups][kBlockTiles];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) load_factors(keys.v_scale[g], attended, scale[g]);
    update_unit(scale);
    const float inverse = __uint_as_float(0x7F000000u - __float_as_uint(unit));
    const std::uint32_t even_inverse = detail::both_halves(inverse), odd_inverse = detail::both_halves(inverse / 16);
    add_zeros(keys, attended, weights);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      std::uint32_t scaled[kBlockTiles][2];
#pragma unroll
      for (int n = 0; n < kBlockTiles; ++n) {
        const std::uint32_t in_units = detail::multiply_halves(scale[g][n], n % 2 == 0 ? even_inverse : odd_inverse);
#pragma unroll
        for (int r = 0; r < 2; ++r) scaled[n][r] = detail::multiply_halves(weights[n][r], in_units);
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const uint4 words = keys.v[g][m][lane];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          std::uint32_t codes[4];
          detail::codes_of(word(words, w), codes);
#pragma unroll
          for (int n = 0; n < 4; n += 2) {
            const int at = w % 2 * 4 + n;
            const std::uint32_t a[4] = {scaled[at][0], scaled[at][1], scaled[at + 1][0], scaled[at + 1][1]};
            ptx::mma_16816<__half>(o[8 * g + 2 * m + w / 2], a, codes[n], codes[n + 1]);
          }
        }
      }
    }
  }

  // Loads scales or zeros of this lane's keys. Those of keys that no row attends become 0, whatever stands there.
  __device__ void load_factors(const std::uint16_t* from, std::uint32_t attended,
                               std::uint32_t (&factors)[kBlockTiles]) const {
#pragma unroll
    for (int n = 0; n < kBlockTiles; ++n) {
      factors[n] = reinterpret_cast<const std::uint32_t*>(from)[4 * n + lane % 4] & halves(attended >> 2 * n);
    }
  }

  __device__ void update_unit(const std::uint32_t (&scale)[kGroups][kBlockTiles]) {
    std::uint32_t largest = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int n = 0; n < kBlockTiles; ++n) largest = detail::larger_halves(largest, scale[g][n]);
    }
    largest = detail::larger_halves(largest, __shfl_xor_sync(0xffffffff, largest, 1));
    largest = detail::larger_halves(largest, __shfl_xor_sync(0xffffffff, largest, 2));
    const float2 pair = ptx::unpack2<__half>(largest);
    const std::uint32_t above = (__float_as_uint(fmaxf(pair.x, pair.y)) & 0x7F800000u) + 0x00800000u;
    const float next = fmaxf(fmaxf(unit, kLeastUnit), __uint_as_float(above));
    if (next == unit) return;
    const float shrink = unit / next;
    const float factors[2] = {shrink, shrink};
    Base::scale_output(factors);
    unit = next;
  }

  // Zeros of V: channel g of the product is group g, so that lane % 4 == 0 ends up with all.
  __device__ void add_zeros(const Keys& keys, std::uint32_t attended, const std::uint32_t (&weights)[kBlockTiles][2]) {
    const unsigned row = lane / 4;
    std::uint32_t zeros[kBlockTiles];
    load_factors(keys.v_zero[row % kGroups], row < kGroups ? attended : 0, zeros);
#pragma unroll
    for (int n = 0; n < kBlockTiles; n += 2) {
      const std::uint32_t a[4] = {weights[n][0], weights[n][1], weights[n + 1][0], weights[n + 1][1]};
      ptx::mma_16816<__half>(zero_sum, a, zeros[n], zeros[n + 1]);
    }
  }

  std::uint32_t q[2][4 * kWords];  // of rows lane / 4 and 8 further: pairs of this lane's dimensions, as codes lie
  float factor[2];                 // of the scores of those rows
  float unit = 1 / kCodes;         // the ring's values count as they are
  float zero_sum[4] = {};
};

}  // namespace heddle::cuda::sm80::attention_decode
