// Which scales a rule considers for a group of weights: a function of their range alone. Quantisation takes the one
// with the least squared error, the first of equal ones; the plain rule's scale is the first. Shared by the reference
// and the kernels; docs/formats.md says the same in formulas.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/dtypes.h"
#include "lowbit/formats.h"

namespace heddle::lowbit {

// What a group's weights span. Without zero points: high = max |w|, low is not asked for. With them, 0 is inside:
// low = min(0, min w), high = max(0, max w).
struct Range {
  float low = 0.0f, high = 0.0f;
};

constexpr int kMaxCandidates = 48;  // a multiple of every target's lanes, so that whole vectors can be read

struct Candidates {
  int count = 0;
  std::array<std::uint32_t, kMaxCandidates> stored;  // bits, as the format stores a scale
  std::array<float, kMaxCandidates> scale;           // what codes are multiplied with, the global scale included
  std::array<float, kMaxCandidates> zero;            // the zero point, or kInt4Zero

  void add(std::uint32_t bits, float value, float zero_point = kInt4Zero) {
    stored[count] = bits;
    scale[count] = value;
    zero[count] = zero_point;
    ++count;
  }
};

// Grid of the mse rule for f32 and f16 scales: factors 48/32 down to 9/32 of the plain scale. More than 1 helps tables
// whose largest step is their last.
constexpr int kFactors = 40;
constexpr float factor(int i) {
  if (i == 0) return 1.0f;
  return static_cast<float>(i <= 16 ? 49 - i : 48 - i) / 32.0f;
}

// Of the mse rule for e4m3 scales: codes around that of amax / 6. Seven up is 1.83 or more times the scale, amax / 3.3.
constexpr int kCodesBelow = 4, kCodesAbove = 7;

// The global scale that makes every e4m3 block scale fit, if amax is the matrix's largest |w|. Rules that may map it to
// 4 or less need scales above amax / 6, so they leave room below 448.
inline float own_global_scale(ScaleRule rule, float amax) {
  const float scale = amax / (6.0f * (rule == ScaleRule::plain ? 448.0f : 256.0f));
  return scale > 0.0f ? scale : 1.0f;  // a matrix of zeros, or of numbers that no scale can tell from zero
}

// Least scale of e2m1_row.
constexpr float kLeastRowScale = 1e-8f;

inline void add_e4m3(ScaleRule rule, float amax, float global, Candidates& out) {
  const auto add = [&](int code) {
    const E4M3 scale{static_cast<std::uint8_t>(code)};
    out.add(scale.bits, scale.value() * global);
  };
  const int six = E4M3::nearest(amax / (6.0f * global)).bits;
  add(six);
  if (rule == ScaleRule::four_six) add(E4M3::nearest(amax / (4.0f * global)).bits);
  if (rule != ScaleRule::mse || amax == 0.0f) return;
  for (int step = -kCodesBelow; step <= kCodesAbove; ++step) {
    if (step != 0) add(std::min(std::max(six + step, 1), 126));
  }
}

inline void add_e8m0(ScaleRule rule, float amax, Candidates& out) {
  const auto add = [&](int exponent) {
    const E8M0 scale = E8M0::power(exponent);
    out.add(scale.bits, scale.value());
  };
  // The exponent of amax, after a carry that the rule wants, less that of 4, the largest power of two among codes.
  const auto exponent = [&](std::uint32_t carry) {
    return static_cast<int>((std::bit_cast<std::uint32_t>(amax) + carry) >> 23) - 127 - 2;
  };
  const int up = exponent(0x3fffffu);  // carries above 1.5 * 2^e = 6 * 2^(e - 2)
  switch (rule) {
    case ScaleRule::floor:
      return add(exponent(0));
    case ScaleRule::even:  // carries from 1.75 * 2^e on
      return add(exponent(0x200000u));
    case ScaleRule::mse:
      add(up);
      for (int step = -1; step <= 2; ++step) {
        if (exponent(0) + step != up) add(exponent(0) + step);
      }
      return;
    default:
      return add(up);
  }
}

inline void add_plain_or_grid(const Format& format, ScaleRule rule, const Range& range, Candidates& out) {
  const float base = format.zero_points ? (range.high - range.low) / 15.0f : range.high / largest_of(format.element);
  const bool search = rule == ScaleRule::mse && base > 0.0f;
  for (int i = 0; i < (search ? kFactors : 1); ++i) {
    const float f = search ? factor(i) : 1.0f;
    float scale = std::min(base * f, std::numeric_limits<float>::max());
    if (format.element == Element::e2m1_row) scale = std::max(scale, kLeastRowScale);
    if (format.scale == ScaleType::f32) {
      out.add(std::bit_cast<std::uint32_t>(scale), scale);
      continue;
    }
    const std::uint16_t half = f32_to_f16(std::min(scale, 65504.0f));
    scale = f16_to_f32(half);
    float zero = kInt4Zero;
    if (format.zero_points) {
      zero = scale > 0.0f ? std::min(std::max(std::nearbyintf(-(range.low * f) / scale), 0.0f), 15.0f) : 0.0f;
    }
    out.add(half, scale, zero);
  }
}

inline void find_candidates(const Format& format, ScaleRule rule, const Range& range, float global, Candidates& out) {
  out.count = 0;
  if (format.scale == ScaleType::e4m3) return add_e4m3(rule, range.high, global, out);
  if (format.scale == ScaleType::e8m0) return add_e8m0(rule, range.high, out);
  add_plain_or_grid(format, rule, range, out);
}

// Whether the format has the rule, and whether the rule compares errors.
constexpr bool has_rule(const Format& format, ScaleRule rule) {
  switch (rule) {
    case ScaleRule::plain:
    case ScaleRule::mse:
      return true;
    case ScaleRule::four_six:
      return format.scale == ScaleType::e4m3;
    default:
      return format.scale == ScaleType::e8m0;
  }
}
constexpr bool searches(ScaleRule rule) { return rule == ScaleRule::mse || rule == ScaleRule::four_six; }

}  // namespace heddle::lowbit
