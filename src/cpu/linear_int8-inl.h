// x W^T in integers: rows of x in 8 bits with a scale each, four columns of a row of W in a lane. Codes are taken as
// u8 = value / step + offset, so that a group's sum is step * scale * (sum of u8 x - offset * sum of x). Weights of 8
// bits keep their sign where products of u8 would overflow.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/linear_codes-inl.h"
#include "cpu/linear_kernels.h"
#include "cpu/simd-inl.h"
#include "cpu/unit-inl.h"
#include "lowbit/packed.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// Load() gives two words of each row for eight columns; which columns a word has is the order in which x is staged.

// Codes of four bits: even columns, odd columns.
struct Nibbles {
  HWY_INLINE void Load(const std::uint8_t* step, int slice, V8& first, V8& second) const {
    const VU word = hn::LoadU(DU(), reinterpret_cast<const std::uint32_t*>(step) + slice * kLanes);
    const V8 nibble = hn::Set(D8(), std::uint8_t{15});
    first = hn::And(hn::BitCast(D8(), word), nibble);
    second = hn::And(hn::BitCast(D8(), hn::ShiftRight<4>(word)), nibble);
  }
  HWY_INLINE VI Dot(VI sum, V8 codes, V8 x) const { return ByteUnit::Dot(sum, codes, x); }
  // dot - offset * total, exact below 2^24
  HWY_INLINE VF Exact(VI dot, VF offset, float total) const {
    return hn::NegMulAdd(offset, hn::Set(DF(), total), hn::ConvertTo(DF(), dot));
  }
};

// E2M1 in halves: 12 + 2 * value. INT4 codes are such numbers already.
struct HalvesOfE2m1 : Nibbles {
  static constexpr float kStep = 0.5f, kOffset = 12;
  static constexpr bool kZeros = false;
  HalvesOfE2m1() {
    alignas(16) std::uint8_t values[16];
    for (int code = 0; code < 16; ++code) values[code] = static_cast<std::uint8_t>(12 + 2 * kE2m1Values[code]);
    table = hn::LoadDup128(D8(), values);
  }
  HWY_INLINE void Load(const std::uint8_t* step, int slice, V8& first, V8& second) const {
    Nibbles::Load(step, slice, first, second);
    first = hn::TableLookupBytes(table, first);
    second = hn::TableLookupBytes(table, second);
  }
  V8 table;
};
template <bool kStored>
struct Int4Numbers : Nibbles {
  static constexpr float kStep = 1, kOffset = lowbit::kInt4Zero;
  static constexpr bool kZeros = kStored;
};

// kLanes bytes of each of four columns, which are 16 apart.
HWY_INLINE V8 LoadFourColumns(const std::uint8_t* from) {
#if HWY_TARGET == HWY_AVX2
  const auto two = [](const std::uint8_t* at) HWY_ATTR {
    return _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)),
                              _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at + 16)));
  };
  return V8{_mm256_inserti128_si256(_mm256_castsi128_si256(two(from)), two(from + 32), 1)};
#else
  if constexpr (kLanes == lowbit::kPanelRows) return hn::LoadU(D8(), from);
  alignas(64) std::uint8_t bytes[4 * kLanes];
  for (int c = 0; c < 4; ++c) std::memcpy(bytes + c * kLanes, from + c * lowbit::kPanelRows, kLanes);
  return hn::Load(D8(), bytes);
#endif
}

// INT8: columns 0 to 3, columns 4 to 7.
struct Int8Numbers {
  static constexpr float kStep = 1;
  static constexpr bool kZeros = false;
  static constexpr float kOffset = ByteUnit::kOffset;
  Int8Numbers() {
    // Four rows of a column lie in a word: to the columns of four rows, and within those to a row's columns.
    alignas(64) std::uint32_t words[kLanes];
    for (int row = 0; row < kLanes / 4; ++row) {
      for (int c = 0; c < 4; ++c) words[4 * row + c] = static_cast<std::uint32_t>(c * (kLanes / 4) + row);
    }
    gather = hn::Load(DU(), words);
    alignas(16) std::uint8_t bytes[16];
    for (int i = 0; i < 16; ++i) bytes[i] = static_cast<std::uint8_t>(i % 4 * 4 + i / 4);
    turn = hn::LoadDup128(D8(), bytes);
  }
  HWY_INLINE V8 Word(const std::uint8_t* from) const {
    const VU columns = hn::BitCast(DU(), LoadFourColumns(from));
    const VU rows = kLanes == 4 ? columns : hn::TableLookupLanes(columns, hn::IndicesFromVec(DU(), gather));
    const V8 word = hn::TableLookupBytes(hn::BitCast(D8(), rows), turn);
    return kOffset == 0 ? word : hn::Xor(word, hn::Set(D8(), std::uint8_t{0x80}));
  }
  HWY_INLINE void Load(const std::uint8_t* step, int slice, V8& first, V8& second) const {
    const std::uint8_t* from = step + slice * kLanes;
    first = Word(from);
    second = Word(from + 4 * lowbit::kPanelRows);
  }
  HWY_INLINE VI Dot(VI sum, V8 w, V8 x) const { return ByteUnit::DotSigned(sum, w, x); }
  HWY_INLINE VF Exact(VI dot, VF, float total) const {
    constexpr auto kWhole = static_cast<std::int32_t>(kOffset);
    return hn::ConvertTo(DF(), hn::Sub(dot, hn::Set(DI(), kWhole * static_cast<std::int32_t>(total))));
  }
  VU gather;
  V8 turn;
};

// As DotRows, of rows m0 and on of x. A span is a group, or kInt8Columns of it.
template <int M, int V, class Numbers, class Scales>
HWY_NOINLINE void DotInt8Rows(const Numbers& given_numbers, const Scales& given_scales, const lowbit::Panels& w,
                              const Int8Rows& x, std::int64_t m0, std::int64_t first, int vector,
                              float* HWY_RESTRICT sums) {
  const DF d;
  const DI di;
  const DU du;
  const lowbit::PanelLayout& l = w.layout;
  const Numbers numbers = given_numbers;
  const Scales scales = given_scales;
  const std::int64_t columns = l.columns, row_words = columns / 4;
  const std::uint32_t* words = x.words + m0 * row_words;
  VF sum[M][V];
  HWY_UNROLL(8)
  for (int m = 0; m < M; ++m) {
    HWY_UNROLL(3)
    for (int v = 0; v < V; ++v) sum[m][v] = hn::Zero(d);
  }
  const SlicePlace place[3] = {{w, first, vector}, {w, first, vector + (V > 1 ? 1 : 0)}, {w, first, vector + V - 1}};
  const std::int64_t span = std::min(l.group, kInt8Columns);
  for (std::int64_t k = 0, s = 0; k < columns; ++s) {
    VI dot[M][V];
    HWY_UNROLL(8)
    for (int m = 0; m < M; ++m) {
      HWY_UNROLL(3)
      for (int v = 0; v < V; ++v) dot[m][v] = hn::Zero(di);
    }
    const std::int64_t g = k / l.group;
    for (const std::int64_t end = std::min({columns, k + span, (g + 1) * l.group}); k < end; k += lowbit::kPanelStep) {
      V8 first_words[V], second_words[V];
      HWY_UNROLL(3)
      for (int v = 0; v < V; ++v) numbers.Load(place[v].step(l, k), place[v].slice, first_words[v], second_words[v]);
      HWY_UNROLL(8)
      for (int m = 0; m < M; ++m) {
        const std::uint32_t* pair = words + m * row_words + k / 4;
        const V8 x0 = hn::BitCast(D8(), hn::Set(du, pair[0])), x1 = hn::BitCast(D8(), hn::Set(du, pair[1]));
        HWY_UNROLL(3)
        for (int v = 0; v < V; ++v) {
          dot[m][v] = numbers.Dot(numbers.Dot(dot[m][v], first_words[v], x0), second_words[v], x1);
        }
      }
    }
    HWY_UNROLL(3)
    for (int v = 0; v < V; ++v) {
      const VF step = hn::Set(d, Numbers::kStep);
      const VF scale = hn::Mul(scales.Load(place[v].panel + l.scales, place[v].scale_index(g)), step);
      VF offset = hn::Set(d, Numbers::kOffset);
      if constexpr (Numbers::kZeros) offset = place[v].template Zero<Numbers>(l, g);
      HWY_UNROLL(8)
      for (int m = 0; m < M; ++m) {
        const VF exact = numbers.Exact(dot[m][v], offset, x.totals[(m0 + m) * x.spans + s]);
        sum[m][v] = hn::MulAdd(exact, scale, sum[m][v]);
      }
    }
  }
  HWY_UNROLL(8)
  for (int m = 0; m < M; ++m) {
    const VF scale = hn::Set(d, x.scales[m0 + m]);
    HWY_UNROLL(3)
    for (int v = 0; v < V; ++v) hn::StoreU(hn::Mul(sum[m][v], scale), d, sums + m * kLinearTile + v * kLanes);
  }
}

template <int M, class Numbers, class Scales>
void DotInt8Tile(const Numbers& numbers, const Scales& scales, const lowbit::Panels& w, const Int8Rows& x,
                 std::int64_t m0, std::int64_t first, int vectors, float* sums) {
  constexpr int V = M == 8 ? 1 : kRegisters == 32 ? 3 : M == 1 ? 2 : 1;
  int n = 0;
  for (; n + V <= vectors; n += V) DotInt8Rows<M, V>(numbers, scales, w, x, m0, first, n, sums + n * kLanes);
  for (; n < vectors; ++n) DotInt8Rows<M, 1>(numbers, scales, w, x, m0, first, n, sums + n * kLanes);
}

// The whole product of one task: `count` rows of x.
inline void MultiplyInt8(const lowbit::Panels& w, const Int8Rows& x, std::int64_t count, std::int64_t first,
                         int vectors, float* sums) {
  using lowbit::Element;
  const auto run = [&](const auto& numbers, const auto& scales) HWY_ATTR {
    if (count == 1) return DotInt8Tile<1>(numbers, scales, w, x, 0, first, vectors, sums);
    if (count == 2) return DotInt8Tile<2>(numbers, scales, w, x, 0, first, vectors, sums);
    for (std::int64_t m = 0; m < count; m += 4) {
      DotInt8Tile<4>(numbers, scales, w, x, m, first, vectors, sums + m * kLinearTile);
    }
  };
  const float global = w.format.global_scale ? w.global_scale() : 1.0f;
  if (w.format.element == Element::int8) return run(Int8Numbers(), F32Scales());
  if (w.format.element == Element::int4) {
    if (w.format.zero_points) return run(Int4Numbers<true>(), F16Scales());
    return run(Int4Numbers<false>(), F16Scales());
  }
  if (w.format.scale == lowbit::ScaleType::e4m3) return run(HalvesOfE2m1(), E4m3Scales(global));
  if (w.format.scale == lowbit::ScaleType::e8m0) return run(HalvesOfE2m1(), E8m0Scales());
  run(HalvesOfE2m1(), F32Scales());
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
