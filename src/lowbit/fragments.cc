#include "lowbit/fragments.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "lowbit/formats.h"

namespace heddle::lowbit {
namespace {

constexpr std::uint8_t kE4M3NaN = 0x7f;

// Sign and magnitude of element (row, column); 0 where there is none.
unsigned code_at(const Matrix& m, std::int64_t row, std::int64_t column) {
  if (row >= m.N || column >= m.K) return 0;
  const NibblePair pair{m.codes[row * m.row_bytes + column / 2]};
  return (column % 2 == 0) == m.format.high_nibble_first ? pair.high() : pair.low();
}

// Scales that are powers of two: the largest of each row, as stored; 255 (NaN) if any is that.
std::vector<std::uint8_t> largest_scales(const Matrix& m) {
  std::vector<std::uint8_t> largest;
  if (m.format.scale != ScaleType::e8m0) return largest;
  for (std::int64_t row = 0; row < m.N; ++row) {
    const auto* scales = static_cast<const std::uint8_t*>(m.scales) + row * m.groups;
    largest.push_back(*std::max_element(scales, scales + m.groups));
  }
  return largest;
}

// Exponent of a scale over the largest of its row; 0 or less.
int exponent_below(const Matrix& m, const std::vector<std::uint8_t>& largest, std::int64_t row, std::int64_t group) {
  return static_cast<const std::uint8_t*>(m.scales)[row * m.groups + group] - largest[row];
}

float power_or_nan(std::uint8_t largest, int shift) {
  return largest == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, largest - 127 + shift);
}

// kScaleFactor times an E4M3 scale, as 5 bits of exponent and 3 of mantissa.
std::uint8_t widened(std::uint8_t e4m3) {
  const float x = kE4M3Values[e4m3];
  if (!(x > 0)) return 1 << 3;  // the group's codes become zeros
  int exponent = 0;
  const float fraction = std::frexp(x * FragmentBlock::kScaleFactor, &exponent);  // in [0.5, 1)
  return static_cast<std::uint8_t>((exponent - 1 + 15) << 3 | static_cast<int>(fraction * 16) % 8);
}

// Half of a word, of the codes of four registers.
std::uint32_t half_word(const unsigned (&code)[4]) {
  const auto put = [](unsigned c, int sign, int magnitude) { return (c >> 3 & 1) << sign | (c & 7) << magnitude; };
  return put(code[0], 15, 6) | put(code[1], 12, 3) | put(code[2], 13, 0) | put(code[3], 14, 9);
}

// Calls visit(block, thread, the thread's first place) for all blocks, those of a row of blocks one after the other.
template <class Visit>
void for_each_thread(const Matrix& m, Executor& executor, Visit visit) {
  const std::int64_t columns = blocks_of_columns(m.K);
  executor.parallel_for(blocks_of_rows(m.N), [&](std::int64_t b, int /*worker*/) {
    for (std::int64_t k = 0; k < columns; ++k) {
      for (int t = 0; t < 128; ++t) visit(b * columns + k, t, b * kBlockRows + t / 32 * 16 + t % 32 / 4);
    }
  });
}

// Calls visit(place, group of kGroup columns, where that lies in its block's row, the block), for all places.
template <int kGroup, class Visit>
void for_each_group(const Matrix& m, Visit visit) {
  constexpr std::int64_t kGroups = kBlockColumns / kGroup;
  const std::int64_t columns = blocks_of_columns(m.K);
  for (std::int64_t place = 0; place < blocks_of_rows(m.N) * kBlockRows; ++place) {
    for (std::int64_t g = 0; g < columns * kGroups; ++g) {
      visit(place, g, g % kGroups, place / kBlockRows * columns + g / kGroups);
    }
  }
}

}  // namespace

FragmentLayout fragment_layout(WeightOrder order, std::int64_t rows, std::int64_t columns) {
  constexpr std::int64_t kAlignment = 256;
  const bool narrow = order == WeightOrder::fragments8;
  FragmentLayout l;
  l.row_blocks = blocks_of_rows(rows);
  l.column_blocks = blocks_of_columns(columns);
  l.blocks = (l.row_blocks * kBlockRows * 4 + kAlignment - 1) / kAlignment * kAlignment;
  l.bytes = l.blocks + l.row_blocks * l.column_blocks *
                           static_cast<std::int64_t>(narrow ? sizeof(FragmentBlock8) : sizeof(FragmentBlock));
  return l;
}

void pack(const Matrix& m, bool gated, FragmentBlock* blocks, float* row_scales, Executor& executor) {
  constexpr int kLeast = -29,
                kTop = 30;  // of 5 bits of exponent: the largest scale's, and how far below it others may be
  constexpr int kBias = 15, kFactorBits = 7;
  const std::int64_t columns = blocks_of_columns(m.K);
  const std::vector<std::uint8_t> largest = largest_scales(m);
  for (std::int64_t place = 0; place < blocks_of_rows(m.N) * kBlockRows; ++place) {
    const std::int64_t row = row_at(place, gated);
    if (row >= m.N) {
      row_scales[place] = 0.0f;
    } else if (m.format.scale == ScaleType::e8m0) {
      row_scales[place] = power_or_nan(largest[row], kBias - kTop + kFactorBits);
    } else if (m.format.scale == ScaleType::e4m3) {
      const auto* scales = static_cast<const std::uint8_t*>(m.scales) + row * m.groups;
      const bool spoilt = std::find(scales, scales + m.groups, kE4M3NaN) != scales + m.groups;
      row_scales[place] = spoilt ? std::numeric_limits<float>::quiet_NaN() : *m.global_scale;
    } else {
      row_scales[place] = static_cast<const float*>(m.scales)[row];
    }
  }
  for_each_group<FragmentBlock::kGroup>(
      m, [&](std::int64_t place, std::int64_t g, std::int64_t at, std::int64_t block) {
        const std::int64_t row = row_at(place, gated), group = g * FragmentBlock::kGroup / m.group;
        int exponent = kBias + kFactorBits;  // 1: also where there is nothing to be scaled
        std::uint8_t stored = static_cast<std::uint8_t>(exponent << 3);
        if (row < m.N && group < m.groups) {
          if (m.format.scale == ScaleType::e4m3) {
            stored = widened(static_cast<const std::uint8_t*>(m.scales)[row * m.groups + group]);
          } else if (m.format.scale == ScaleType::e8m0) {
            exponent = std::max(exponent_below(m, largest, row, group), kLeast);
            stored = static_cast<std::uint8_t>((kTop + exponent) << 3);
          }
        }
        blocks[block].scales[place % kBlockRows][at] = stored;
      });
  const auto code = [&](std::int64_t place, std::int64_t column) {
    const std::int64_t row = row_at(place, gated);
    const unsigned found = code_at(m, row, column);
    if (row >= m.N || column >= m.K) return found;
    const std::int64_t group = column / m.group;
    const bool zero = m.format.scale == ScaleType::e4m3
                          ? static_cast<const std::uint8_t*>(m.scales)[row * m.groups + group] == 0
                      : m.format.scale == ScaleType::e8m0 ? exponent_below(m, largest, row, group) < kLeast
                                                          : false;
    return zero ? 0 : found;
  };
  for_each_thread(m, executor, [&](std::int64_t block, int t, std::int64_t place) {
    for (int step = 0; step < FragmentBlock::kSteps; ++step) {
      const std::int64_t column = block % columns * kBlockColumns + step * 16 + 2 * (t % 4);
      std::uint32_t word = 0;
      for (int half = 0; half < 2; ++half) {
        const std::int64_t c = column + half;
        word |= half_word({code(place, c), code(place + 8, c), code(place, c + 8), code(place + 8, c + 8)})
                << 16 * half;
      }
      blocks[block].codes[step / 4][t][step % 4] = word;
    }
  });
}

void pack(const Matrix& m, bool gated, FragmentBlock8* blocks, float* row_scales, Executor& executor) {
  constexpr int kMost = FragmentBlock8::kMaxExponent;
  const std::int64_t columns = blocks_of_columns(m.K);
  const std::vector<std::uint8_t> largest = largest_scales(m);
  // Of a scale over the least one that the row can have; negative: it has to be that one.
  const auto exponent_of = [&](std::int64_t row, std::int64_t group) {
    return largest.empty() || row >= m.N || group >= m.groups ? 0 : kMost + exponent_below(m, largest, row, group);
  };
  for (std::int64_t place = 0; place < blocks_of_rows(m.N) * kBlockRows; ++place) {
    const std::int64_t row = row_at(place, gated);
    row_scales[place] = row >= m.N        ? 0.0f
                        : largest.empty() ? static_cast<const float*>(m.scales)[row]
                                          : power_or_nan(largest[row], -kMost);
  }
  for_each_group<FragmentBlock8::kGroup>(
      m, [&](std::int64_t place, std::int64_t g, std::int64_t at, std::int64_t block) {
        const int exponent = exponent_of(row_at(place, gated), g * FragmentBlock8::kGroup / m.group);
        blocks[block].exponents[place % kBlockRows][at] = static_cast<std::uint8_t>(std::max(exponent, 0));
      });
  const auto code = [&](std::int64_t place, std::int64_t column) {
    const std::int64_t row = row_at(place, gated);
    const unsigned found = code_at(m, row, column);
    const int exponent = exponent_of(row, column / m.group);
    if (exponent >= 0) return found;
    const E2M1 element{static_cast<std::uint8_t>(found)};
    return static_cast<unsigned>(E2M1::nearest(std::ldexp(element.value(), exponent)).code);
  };
  for_each_thread(m, executor, [&](std::int64_t block, int t, std::int64_t place) {
    for (int step = 0; step < FragmentBlock8::kSteps; ++step) {
      const std::int64_t column = block % columns * kBlockColumns + step * 32 + 4 * (t % 4);
      for (int r = 0; r < 2; ++r) {
        std::uint32_t word = 0;
        for (int i = 0; i < 4; ++i) {
          const unsigned first = code(place + 8 * r, column + i), second = code(place + 8 * r, column + 16 + i);
          word |= (first & 7) << 4 * i | (second & 7) << (16 + 4 * i) | (first >> 3) << (8 * i + 7) |
                  (second >> 3) << (8 * i + 3);
        }
        blocks[block].codes[step / 2][t][step % 2 * 2 + r] = word;
      }
    }
  });
}

}  // namespace heddle::lowbit
