// Which scales a rule considers for a group of weights: a function of their range alone. Quantisation takes the one
// with the least squared error, the first of equal ones; the plain rule's scale is the first. Shared by the reference
// and the kernels, those of GPUs too, which take one candidate at a time; docs/formats.md says the same in formulas.
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

struct ScaleCandidate {
  std::uint32_t stored = 0;  // bits, as the format stores a scale
  float scale = 0.0f;        // what codes are multiplied with, the global scale included
  float zero = kInt4Zero;    // the zero point, or kInt4Zero
};

// All that a group has, as arrays.
struct Candidates {
  int count = 0;
  std::array<std::uint32_t, kMaxCandidates> stored;
  std::array<float, kMaxCandidates> scale, zero;
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
constexpr float own_global_scale(ScaleRule rule, float amax) {
  const float scale = amax / (6.0f * (rule == ScaleRule::plain ? 448.0f : 256.0f));
  return scale > 0.0f ? scale : 1.0f;  // a matrix of zeros, or of numbers that no scale can tell from zero
}

// Least scale of e2m1_row.
constexpr float kLeastRowScale = 1e-8f;

constexpr ScaleCandidate e4m3_candidate(ScaleRule rule, float amax, float global, int index) {
  int code = E4M3::nearest(amax / (6.0f * global)).bits;
  if (index > 0 && rule == ScaleRule::four_six) code = E4M3::nearest(amax / (4.0f * global)).bits;
  if (index > 0 && rule == ScaleRule::mse) {
    const int step = index - 1 - kCodesBelow;
    code = std::min(std::max(code + (step >= 0 ? step + 1 : step), 1), 126);
  }
  const E4M3 scale{static_cast<std::uint8_t>(code)};
  return {scale.bits, scale.value() * global};
}

// The exponent of amax, after a carry that the rule wants, less that of 4, the largest power of two among codes.
constexpr int e2m1_exponent(float amax, std::uint32_t carry) {
  return static_cast<int>((std::bit_cast<std::uint32_t>(amax) + carry) >> 23) - 127 - 2;
}

constexpr ScaleCandidate e8m0_candidate(ScaleRule rule, float amax, int index) {
  const int floor = e2m1_exponent(amax, 0), up = e2m1_exponent(amax, 0x3fffffu);  // carries above 6 * 2^(e - 2)
  int exponent = up;
  if (rule == ScaleRule::floor) exponent = floor;
  if (rule == ScaleRule::even) exponent = e2m1_exponent(amax, 0x200000u);  // carries from 1.75 * 2^e on
  if (index > 0) {  // of the search: floor - 1 to floor + 2, without `up`, which came first
    const int step = index - 2;
    exponent = floor + (step >= up - floor ? step + 1 : step);
  }
  const E8M0 scale = E8M0::power(exponent);
  return {scale.bits, scale.value()};
}

// The plain rule's scale, before it is rounded to the scale's type.
constexpr float plain_scale(const Format& format, const Range& range) {
  return format.zero_points ? (range.high - range.low) / 15.0f : range.high / largest_of(format.element);
}

constexpr ScaleCandidate grid_candidate(const Format& format, const Range& range, int index) {
  const float f = factor(index);
  float scale = std::min(plain_scale(format, range) * f, std::numeric_limits<float>::max());
  if (format.element == Element::e2m1_row && scale < kLeastRowScale)
    scale = kLeastRowScale;  // no reference to it on GPUs
  if (format.scale == ScaleType::f32) return {std::bit_cast<std::uint32_t>(scale), scale};
  const std::uint16_t half = f32_to_f16(std::min(scale, 65504.0f));
  scale = f16_to_f32(half);
  float zero = kInt4Zero;
  if (format.zero_points) {
    zero = scale > 0.0f ? std::min(std::max(nearbyintf(-(range.low * f) / scale), 0.0f), 15.0f) : 0.0f;
  }
  return {half, scale, zero};
}

// How many scales the rule considers, and which; the plain rule's, or the rule's only one, is number 0.
constexpr int candidate_count(const Format& format, ScaleRule rule, const Range& range) {
  if (rule == ScaleRule::four_six) return 2;
  if (rule != ScaleRule::mse) return 1;
  if (format.scale == ScaleType::e4m3) return range.high == 0.0f ? 1 : 1 + kCodesBelow + kCodesAbove;
  if (format.scale == ScaleType::e8m0) return 4;
  return plain_scale(format, range) > 0.0f ? kFactors : 1;
}
constexpr ScaleCandidate scale_candidate(const Format& format, ScaleRule rule, const Range& range, float global,
                                         int index) {
  if (format.scale == ScaleType::e4m3) return e4m3_candidate(rule, range.high, global, index);
  if (format.scale == ScaleType::e8m0) return e8m0_candidate(rule, range.high, index);
  return grid_candidate(format, range, index);
}

inline void find_candidates(const Format& format, ScaleRule rule, const Range& range, float global, Candidates& out) {
  out.count = candidate_count(format, rule, range);
  for (int i = 0; i < out.count; ++i) {
    const ScaleCandidate candidate = scale_candidate(format, rule, range, global, i);
    out.stored[i] = candidate.stored;
    out.scale[i] = candidate.scale;
    out.zero[i] = candidate.zero;
  }
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
