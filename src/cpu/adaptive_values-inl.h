// What attention with a tolerance must know of each block of values: its mean, and how far its values lie from it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/adaptive_plan.h"
#include "cpu/scratch.h"
#include "cpu/simd-inl.h"
#include "cpu/units/f32-inl.h"
#include "problem/attention.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

class ValueBlocks {
 public:
  ValueBlocks(const AttentionProblem& p, std::byte* memory) : p_(p), width_(mean_width(p)) {
    Scratch scratch(memory);
    rows_ = scratch.take<float>(kAdaptiveKeys * width_);
    columns_ = scratch.take<float>(width_ * kAdaptiveKeys);
    gram_ = scratch.take<float>(kAdaptiveKeys * kAdaptiveKeys);
    bytes_ = scratch.used();
  }
  std::size_t bytes() const { return bytes_; }

  // Blocks [begin, end) of a kv head; `values` and `means` are those of its first.
  void find(std::int64_t b, std::int64_t kv_head, std::int64_t begin, std::int64_t end, ValueBlock* values,
            float* means) {
    const Sequence s = p_.sequence(b);
    for (std::int64_t n = begin; n < end; ++n) {
      const std::int64_t first = n * kAdaptiveKeys, count = std::min(kAdaptiveKeys, s.sk - first);
      for (std::int64_t j = 0; j < kAdaptiveKeys; ++j) {
        if (j < count) {
          LoadRow(p_.key_row(p_.v, b, s, first + j, kv_head), p_.v.dtype, p_.v.stride_d, p_.Dv, width_, row(j));
        } else {
          std::memset(row(j), 0, static_cast<std::size_t>(width_) * 4);
        }
      }
      values[n] = measure(count, means + n * width_);
    }
  }

 private:
  float* row(std::int64_t j) { return rows_ + j * width_; }

  // Of the loaded rows. Figures are those of rows times 2^-exponent, whose largest element is near 1: so no square
  // overflows, and what underflows is below 2^-28 together.
  ValueBlock measure(std::int64_t count, float* mean) {
    const DF d;
    VF top = hn::Zero(d), bad = hn::Zero(d);
    for (std::int64_t i = 0; i < kAdaptiveKeys * width_; i += kLanes) {
      const VF x = hn::LoadU(d, rows_ + i);
      top = hn::Max(top, hn::Abs(x));
      bad = hn::MulAdd(x, hn::Zero(d), bad);  // 0 for finite x, else NaN
    }
    const float largest = hn::GetLane(hn::MaxOfLanes(d, top));
    ValueBlock out;
    std::memset(mean, 0, static_cast<std::size_t>(width_) * 4);
    const bool finite = hn::AllTrue(d, hn::Eq(bad, hn::Zero(d)));
    if (finite && largest == 0.0f) return out;
    // Values that float32 cannot square even so: nothing is replaced, and nobody's tolerance rests on them.
    if (!finite || largest < 0x1p-100f || largest > 0x1p100f) {
      out.radius = out.width = kInfinity;
      return out;
    }
    std::frexp(largest, &out.exponent);
    const float scale = std::ldexp(1.0f, -out.exponent);
    const VF factor = hn::Set(d, scale), share = hn::Set(d, 1.0f / static_cast<float>(count));
    float farthest = 0, longest = 0;
    for (std::int64_t j = 0; j < count; ++j) {
      VF square = hn::Zero(d);
      for (std::int64_t i = 0; i < width_; i += kLanes) {
        const VF x = hn::Mul(hn::LoadU(d, row(j) + i), factor);
        hn::StoreU(x, d, row(j) + i);
        hn::StoreU(hn::Add(hn::LoadU(d, mean + i), x), d, mean + i);
        square = hn::MulAdd(x, x, square);
      }
      longest = std::max(longest, hn::GetLane(hn::SumOfLanes(d, square)));
    }
    for (std::int64_t i = 0; i < width_; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, mean + i), share), d, mean + i);
    for (std::int64_t j = 0; j < count; ++j) {
      VF square = hn::Zero(d);
      for (std::int64_t i = 0; i < width_; i += kLanes) {
        const VF x = hn::Sub(hn::LoadU(d, row(j) + i), hn::LoadU(d, mean + i));
        hn::StoreU(x, d, row(j) + i);
        square = hn::MulAdd(x, x, square);
      }
      farthest = std::max(farthest, hn::GetLane(hn::SumOfLanes(d, square)));
    }
    const VF back = hn::Set(d, std::ldexp(1.0f, out.exponent));
    for (std::int64_t i = 0; i < width_; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, mean + i), back), d, mean + i);
    // Outward: sums of at most 256 squares, and of 1024 products of them, are off by less than 2^-14 of themselves; a
    // product of the Gram matrix by 2^-16 of its rows' lengths, which is 2^-13 of the root of its squares.
    out.longest = std::sqrt(longest) * (1 - 0x1p-12f);
    out.radius = std::sqrt(farthest) * (1 + 0x1p-12f) + 0x1p-28f;
    out.width = std::sqrt(std::sqrt(gram_squares())) * (1 + 0x1p-12f) + 0x1p-28f;
    return out;
  }

  // Sum of the squares of the products of all pairs of centred rows: of their singular values, the fourth powers. Its
  // fourth root is at least the largest of them, and near it, where the root of the squares would be off by the root of
  // how many there are.
  float gram_squares() {
    const DF d;
    for (std::int64_t j = 0; j < kAdaptiveKeys; j += 4) {
      for (std::int64_t i = 0; i < width_; i += 4) {
        Transpose4x4(row(j) + i, width_, columns_ + i * kAdaptiveKeys + j, kAdaptiveKeys);
      }
    }
    constexpr int kVectors = HWY_MIN(2, static_cast<int>(kAdaptiveKeys) / kLanes);
    for (std::int64_t lane = 0; lane < kAdaptiveKeys; lane += kVectors * kLanes) {
      for (std::int64_t j = 0; j < kAdaptiveKeys; j += F32Unit::kTileM) {
        F32Unit::Product<kVectors, Sum::kStore>(width_, {row(j), width_, 1}, {columns_ + lane, kAdaptiveKeys},
                                                gram_ + j * kAdaptiveKeys + lane, kAdaptiveKeys);
      }
    }
    VF sum = hn::Zero(d);
    for (std::int64_t i = 0; i < kAdaptiveKeys * kAdaptiveKeys; i += kLanes) {
      const VF x = hn::LoadU(d, gram_ + i);
      sum = hn::MulAdd(x, x, sum);
    }
    return hn::GetLane(hn::SumOfLanes(d, sum));
  }

  const AttentionProblem& p_;
  const std::int64_t width_;
  std::size_t bytes_ = 0;
  float *rows_ = nullptr, *columns_ = nullptr, *gram_ = nullptr;
};

inline std::size_t ValueScratch(const AttentionProblem& p) { return ValueBlocks(p, nullptr).bytes(); }
inline void FindValueBlocks(const AttentionProblem& p, std::int64_t b, std::int64_t kv_head, std::int64_t begin,
                            std::int64_t end, ValueBlock* values, float* means, std::byte* memory) {
  ValueBlocks(p, memory).find(b, kv_head, begin, end, values, means);
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
