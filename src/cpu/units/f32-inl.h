// Products of f32: every target's, and for every dtype, widened.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/gemm-inl.h"
#include "cpu/simd-inl.h"
#include "problem/attention.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// What the members are: unit-inl.h.
struct F32Unit : RegisterTileUnit<F32Unit, float, float> {
  static constexpr bool kRounds = false;

  static HWY_INLINE VF Load(const float* p) { return hn::LoadU(DF(), p); }
  static HWY_INLINE VF Broadcast(const float* p) { return hn::Set(DF(), *p); }
  static HWY_INLINE VF MulAdd(VF a, VF b, VF sum) { return hn::MulAdd(a, b, sum); }

  static HWY_INLINE void PackRow(const Operand& x, const std::byte* from, std::int64_t width, std::int64_t padded,
                                 float* HWY_RESTRICT to) {
    LoadRow(from, x.dtype, x.stride_d, width, padded, to);
  }
  template <class Put>
  static HWY_INLINE void PackLaneRow(std::int64_t row, std::int64_t width, float*, const Put& put, float* out) {
    put(out + row * width);
  }
  static HWY_INLINE Lanes<float> PackLanes(const float* tile, std::int64_t row, Interval<std::int64_t> words, int,
                                           float*) {
    return {tile + words.begin * row, row};
  }
  static HWY_INLINE const float* PackTile(const float* tile, std::int64_t, Interval<std::int64_t>, std::int64_t,
                                          float*) {
    return tile;
  }
  template <bool kExact>
  static HWY_INLINE void PackWord(const VF* rows, float* to) {
    hn::StoreU(rows[0], DF(), to);
  }
  template <bool kExact>
  static HWY_INLINE void PackElements(VF values, float* to) {
    hn::StoreU(values, DF(), to);
  }

  class PanelPacker {
   public:
    PanelPacker(std::int64_t columns, std::int64_t rows, float* out)
        : columns_(columns), stride_(PanelStride(rows)), out_(out) {}

    HWY_INLINE void put(const float* HWY_RESTRICT words, std::int64_t row) {
      float* HWY_RESTRICT out = out_ + row * kTileM;
      for (std::int64_t i = 0; i < columns_; i += kStep) {
        const auto value = hn::LoadU(DStep(), words + i);
        bad_ = hn::MulAdd(value, hn::Zero(DStep()), bad_);
        hn::StoreU(value, DStep(), out + i / kTileM * stride_ + i % kTileM);
      }
    }
    // x * 0 is 0 for finite x and NaN otherwise.
    bool non_finite() const { return !hn::AllTrue(DStep(), hn::Eq(bad_, hn::Zero(DStep()))); }

   private:
    static constexpr int kStep = HWY_MIN(kLanes, kTileM);
    using DStep = hn::CappedTag<float, kStep>;
    const std::int64_t columns_, stride_;
    float* out_;
    hn::Vec<DStep> bad_ = hn::Zero(DStep());
  };
  static HWY_INLINE void ClearRow(float& word, std::int64_t) { word = 0.0f; }
};

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
