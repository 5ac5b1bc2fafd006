// Products of bf16 pairs, summed in f32 (AVX512_BF16): a word is two neighbours along the summed dimension.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/dtypes.h"
#include "cpu/gemm-inl.h"
#include "cpu/simd-inl.h"
#include "problem/attention.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// What the members are: unit-inl.h.
struct Bf16PairUnit : RegisterTileUnit<Bf16PairUnit, std::uint16_t, std::uint32_t> {
  static constexpr bool kRounds = true;

  static HWY_INLINE VU Load(const Word* p) { return hn::LoadU(DU(), p); }
  static HWY_INLINE VU Broadcast(const Word* p) { return hn::Set(DU(), *p); }
  static HWY_INLINE VF MulAdd(VU a, VU b, VF sum) {
    return VF{_mm512_dpbf16_ps(sum.raw, reinterpret_cast<__m512bh>(a.raw), reinterpret_cast<__m512bh>(b.raw))};
  }

  // bf16 as they are.
  static HWY_INLINE void PackRow(const Operand& x, const std::byte* from, std::int64_t width, std::int64_t padded,
                                 Element* HWY_RESTRICT to) {
    const auto* source = reinterpret_cast<const Element*>(from);
    if (x.dtype == DType::f32) {  // d_o beside an o in f32
      for (std::int64_t d = 0; d < width; ++d)
        to[d] = f32_to_bf16(reinterpret_cast<const float*>(from)[d * x.stride_d]);
    } else if (x.stride_d == 1) {
      std::memcpy(to, source, static_cast<std::size_t>(width) * 2);
    } else {
      for (std::int64_t d = 0; d < width; ++d) to[d] = source[d * x.stride_d];
    }
    std::memset(to + width, 0, static_cast<std::size_t>(padded - width) * 2);
  }
  template <class Put>
  static HWY_INLINE void PackLaneRow(std::int64_t row, std::int64_t width, float* line, const Put& put, Word* out) {
    Element* at = reinterpret_cast<Element*>(line) + row % 2 * width;
    put(at);
    if (row % 2 == 1) Interleave(at - width, at, width, out + row / 2 * width);
  }
  static HWY_INLINE Lanes<Word> PackLanes(const float* tile, std::int64_t row, Interval<std::int64_t> words,
                                          int vectors, Word* to) {
    Pair(tile, row, words, vectors, to);
    return {to + words.begin * kGroup, kGroup};
  }
  // `tile` and `to` may be the same memory.
  static const Word* PackTile(const float* tile, std::int64_t row, Interval<std::int64_t> rows, std::int64_t columns,
                              Word* to) {
    const DF d;
    const hn::Rebind<std::uint16_t, DF> d16;
    for (std::int64_t j = rows.begin; j < rows.end; ++j) {
      auto* halves = reinterpret_cast<Element*>(to) + j * row;
      for (std::int64_t i = 0; i < columns; i += kLanes) {
        const VU bits = RoundToBf16(hn::LoadU(d, tile + j * row + i));
        hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(bits)), d16, halves + i);
      }
    }
    return to;
  }
  template <bool kExact>
  static HWY_INLINE void PackWord(const VF* rows, Word* to) {
    hn::StoreU(Join(Bits<kExact>(rows[0]), Bits<kExact>(rows[1])), DU(), to);
  }
  template <bool kExact>
  static HWY_INLINE void PackElements(VF values, Element* to) {
    const hn::Rebind<std::uint16_t, DF> d16;
    hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(Bits<kExact>(values))), d16, to);
  }

  class PanelPacker {
   public:
    PanelPacker(std::int64_t columns, std::int64_t rows, Word* out)
        : columns_(columns), stride_(PanelStride(rows)), out_(out) {}

    HWY_INLINE void put(const Word* HWY_RESTRICT words, std::int64_t row) {
      Word* HWY_RESTRICT out = out_ + row / 2 * kTileM;
      const hn::FixedTag<std::uint16_t, 8> d16;
      const hn::FixedTag<std::uint32_t, 8> d32;
      static_assert(kTileM == 8);
      const auto* half = reinterpret_cast<const Element*>(words);
      const auto exponent = hn::Set(d16, 0x7f80);
      for (std::int64_t i = 0; i < columns_; i += kTileM) {
        const auto even = hn::LoadU(d16, half + i), odd = hn::LoadU(d16, half + columns_ + i);
        const auto fields = hn::Max(hn::And(even, exponent), hn::And(odd, exponent));
        bad_ = hn::Max(bad_, hn::BitCast(DStep(), hn::PromoteTo(d32, fields)));
        hn::StoreU(hn::Or(hn::PromoteTo(d32, even), hn::ShiftLeft<16>(hn::PromoteTo(d32, odd))), d32,
                   out + i / kTileM * stride_);
      }
    }
    bool non_finite() const { return !hn::AllFalse(DStep(), hn::Eq(bad_, hn::Set(DStep(), 0x7f80u))); }

   private:
    using DStep = hn::CappedTag<Word, kTileM>;
    const std::int64_t columns_, stride_;
    Word* out_;
    hn::Vec<DStep> bad_ = hn::Zero(DStep());
  };
  static HWY_INLINE void ClearRow(Word& word, std::int64_t row) { word &= row % 2 == 0 ? 0xffff0000u : 0x0000ffffu; }

 private:
  // kExact: they are bf16 numbers.
  template <bool kExact>
  static HWY_INLINE VU Bits(VF x) {
    return kExact ? hn::BitCast(DU(), x) : RoundToBf16(x);
  }
  // Two bf16, each in the high half of its lane, in one word: the even one low.
  static HWY_INLINE VU Join(VU even, VU odd) {
    return hn::Or(hn::ShiftRight<16>(even), hn::And(odd, hn::Set(DU(), 0xffff0000u)));
  }

  // Rows (2 j, 2 j + 1) of tile[row][lane], rounded, as words to[j][lane] for j in `words`.
  static void Pair(const float* HWY_RESTRICT tile, std::int64_t row, Interval<std::int64_t> words, int vectors,
                   Word* HWY_RESTRICT to) {
    const DF d;
    for (std::int64_t j = words.begin; j < words.end; ++j) {
      for (int n = 0; n < vectors; ++n) {
        const float* at = tile + 2 * j * row + n * kLanes;
        const VU even = RoundToBf16(hn::LoadU(d, at)), odd = RoundToBf16(hn::LoadU(d, at + row));
        hn::StoreU(Join(even, odd), DU(), to + j * kGroup + n * kLanes);
      }
    }
  }

  static void Interleave(const Element* HWY_RESTRICT even, const Element* HWY_RESTRICT odd, std::int64_t count,
                         Word* HWY_RESTRICT out) {
    const DU d;
    const hn::Rebind<std::uint16_t, DU> d16;
    for (std::int64_t i = 0; i < count; i += kLanes) {
      const VU low = hn::PromoteTo(d, hn::LoadU(d16, even + i)), high = hn::PromoteTo(d, hn::LoadU(d16, odd + i));
      hn::StoreU(hn::Or(low, hn::ShiftLeft<16>(high)), d, out + i);
    }
  }
};

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
