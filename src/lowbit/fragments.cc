#include "lowbit/fragments.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/parallel.h"
#include "lowbit/formats.h"
#include "lowbit/fragment_codes.h"

namespace heddle::lowbit {
namespace {

// Scales that are powers of two: the largest of each row, as stored.
std::vector<std::uint8_t> largest_scales(const Matrix& m) {
  std::vector<std::uint8_t> largest;
  if (m.format.scale != ScaleType::e8m0) return largest;
  for (std::int64_t row = 0; row < m.N; ++row) largest.push_back(largest_scale(m, row));
  return largest;
}

// Exponent of a scale over the largest of its row; 0 or less.
int exponent_below(const Matrix& m, const std::vector<std::uint8_t>& largest, std::int64_t row, std::int64_t group) {
  return static_cast<const std::uint8_t*>(m.scales)[row * m.groups + group] - largest[row];
}

float power_of(std::uint8_t largest, int shift) { return std::ldexp(1.0f, largest - 127 + shift); }

// kScaleFactor times an E4M3 scale, as 5 bits of exponent and 3 of mantissa.
std::uint8_t widened(std::uint8_t e4m3) {
  const float x = kE4M3Values[e4m3];
  if (!(x > 0)) return 1 << 3;  // the group's codes become zeros
  int exponent = 0;
  const float fraction = std::frexp(x * FragmentBlock::kScaleFactor, &exponent);  // in [0.5, 1)
  return static_cast<std::uint8_t>((exponent - 1 + 15) << 3 | static_cast<int>(fraction * 16) % 8);
}

// A word of order fragments16, of code(half, register).
template <class Code>
std::uint32_t word16(Code code) {
  std::uint32_t word = 0;
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 3; ++i) {
      const std::uint32_t c = code(half, i);
      word |= std::rotl(c >> 3 << 15 | (c & 7) << 6, 16 * half + 3 * i);
    }
    const std::uint32_t c = code(half, 3);
    word |= (c >> 3 << 1 | (c >> 2 & 1) | (c & 3) << 3) << 16 * half;
  }
  return word;
}

// A word of order fragments8, of 8 codes.
template <class Code>
std::uint32_t word8(Code code) {
  std::uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned first = code(i), second = code(4 + i);
    word |= (first & 7) << 4 * i | (second & 7) << (16 + 4 * i) | (first >> 3) << (8 * i + 7) |
            (second >> 3) << (8 * i + 3);
  }
  return word;
}
unsigned code_of_word8(std::uint32_t word, int i) {
  const unsigned magnitude = word >> 4 * i & 7;
  return magnitude | (i < 4 ? word >> (8 * i + 7) & 1 : word >> (8 * (i - 4) + 3) & 1) << 3;
}

// Magnitude codes of ScaledBlock8, and the way back.
unsigned exchanged(unsigned code) { return (code & 7) == 5 || (code & 7) == 6 ? code ^ 3 : code; }

// Calls visit(block, thread, the thread's first place) for all blocks, those of a row of blocks one after the other.
template <class Visit>
void for_each_thread(const Matrix& m, Executor& executor, Visit visit, int block_columns = kBlockColumns) {
  const std::int64_t columns = (m.K + block_columns - 1) / block_columns;
  parallel_for(executor, blocks_of_rows(m.N), [&](std::int64_t b, int /*worker*/) {
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

std::array<float, 16> lookup_values(Element element) {
  std::array<float, 16> values{};
  for (unsigned code = 0; code < 16; ++code) {
    const float value = value_of(element, static_cast<std::uint8_t>(code), 0) * lookup_factor(element);
    values[code] = element == Element::fp4_bnb ? std::nearbyint(value) : value;
  }
  return values;
}

FragmentLayout fragment_layout(const Format& format, WeightOrder order, std::int64_t rows, std::int64_t columns) {
  constexpr std::int64_t kAlignment = 256;
  const bool narrow = order == WeightOrder::fragments8;
  const BlockLayout block = block_layout(format);
  FragmentLayout l;
  l.row_blocks = blocks_of_rows(rows);
  l.column_blocks = (columns + block.columns - 1) / block.columns;
  l.blocks = (l.row_blocks * kBlockRows * 4 + kAlignment - 1) / kAlignment * kAlignment;
  const std::int64_t of_narrow = has_scaled_blocks(format) ? sizeof(ScaledBlock8) : sizeof(FragmentBlock8);
  const std::int64_t block_bytes = narrow ? of_narrow : block.bytes;
  l.bytes = l.blocks + l.row_blocks * l.column_blocks * block_bytes;
  return l;
}

void pack(const Matrix& m, bool gated, FragmentBlock* blocks, float* row_scales, Executor& executor) {
  constexpr int kTop = 30;  // of 5 bits of exponent: the largest scale's
  constexpr int kBias = 15, kFactorBits = 7, kLeast = FragmentBlock::kLeastExponent;
  const std::int64_t columns = blocks_of_columns(m.K);
  const std::vector<std::uint8_t> largest = largest_scales(m);
  for (std::int64_t place = 0; place < blocks_of_rows(m.N) * kBlockRows; ++place) {
    const std::int64_t row = row_at(place, gated);
    if (row >= m.N) {
      row_scales[place] = 0.0f;
    } else if (m.format.scale == ScaleType::e8m0) {
      row_scales[place] = power_of(largest[row], kBias - kTop + kFactorBits);
    } else if (m.format.scale == ScaleType::e4m3) {
      row_scales[place] = *m.global_scale;
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
      blocks[block].codes[step / 4][t][step % 4] =
          word16([&](int half, int i) { return code(place + i % 2 * 8, column + half + i / 2 * 8); });
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
                                          : power_of(largest[row], -kMost);
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
    return under_least(found, exponent);
  };
  for_each_thread(m, executor, [&](std::int64_t block, int t, std::int64_t place) {
    for (int step = 0; step < FragmentBlock8::kSteps; ++step) {
      const std::int64_t column = block % columns * kBlockColumns + step * 32 + 4 * (t % 4);
      for (int r = 0; r < 2; ++r) {
        blocks[block].codes[step / 2][t][step % 2 * 2 + r] =
            word8([&](int i) { return code(place + 8 * r, column + i % 4 + i / 4 * 16); });
      }
    }
  });
}

void pack(const Matrix& m, bool gated, ScaledBlock8* blocks, float* row_scales, Executor& executor) {
  constexpr int kLeast = ScaledBlock8::kLeast;
  const std::int64_t columns = blocks_of_columns(m.K);
  const auto* const scales = static_cast<const std::uint8_t*>(m.scales);
  std::vector<int> shifts(static_cast<std::size_t>(m.N));  // of each row, binades
  for (std::int64_t place = 0; place < blocks_of_rows(m.N) * kBlockRows; ++place) {
    const std::int64_t row = row_at(place, gated);
    row_scales[place] = 0.0f;
    if (row >= m.N) continue;
    const int shift = row_shift(largest_scale(m, row));
    shifts[static_cast<std::size_t>(row)] = shift;
    row_scales[place] = std::ldexp(*m.global_scale, shift);
  }
  // Bits of a group's scale under its row's; less than kLeast: it has to be that one.
  const auto bits_of_group = [&](std::int64_t row, std::int64_t group) {
    if (row >= m.N || group >= m.groups || scales[row * m.groups + group] == 0) return kLeast;
    return wide_bits(scales[row * m.groups + group]) - 8 * shifts[static_cast<std::size_t>(row)];
  };
  for_each_group<ScaledBlock8::kGroup>(m, [&](std::int64_t place, std::int64_t g, std::int64_t at, std::int64_t block) {
    const int bits = std::max(bits_of_group(row_at(place, gated), g), kLeast);
    blocks[block].scales[place % kBlockRows][at / 4][at % 2][at / 2 % 2] = ScaledBlock8::stored(bits);
  });
  const auto code = [&](std::int64_t place, std::int64_t column) {
    const std::int64_t row = row_at(place, gated), group = column / m.group;
    if (row >= m.N || column >= m.K || scales[row * m.groups + group] == 0) return 0u;
    const unsigned found = code_at(m, row, column);
    const int bits = bits_of_group(row, group);
    return exchanged(bits < kLeast ? under_least_bits(found, bits) : found);
  };
  for_each_thread(m, executor, [&](std::int64_t block, int t, std::int64_t place) {
    for (int step = 0; step < ScaledBlock8::kSteps; ++step) {
      const std::int64_t column = block % columns * kBlockColumns + step * 32 + 8 * (t % 4);
      for (int r = 0; r < 2; ++r) {
        blocks[block].codes[step / 2][t][step % 2 * 2 + r] =
            word8([&](int i) { return code(place + 8 * r, column + i); });
      }
    }
  });
}

float value8(const Format& format, const std::byte* data, const FragmentLayout& layout, bool gated, std::int64_t row,
             std::int64_t column) {
  const std::int64_t place = place_of(row, gated), k = column % kBlockColumns, r = place % kBlockRows;
  const std::int64_t number = place / kBlockRows * layout.column_blocks + column / kBlockColumns;
  const float row_scale = reinterpret_cast<const float*>(data)[place];
  const std::int64_t thread = r / 16 * 32 + r % 8 * 4, word = k / 32 % 2 * 2 + r % 16 / 8, of_step = k % 32;
  if (!has_scaled_blocks(format)) {
    const auto& block = reinterpret_cast<const FragmentBlock8*>(data + layout.blocks)[number];
    const std::uint32_t codes = block.codes[k / 64][thread + of_step % 16 / 4][word];
    const unsigned code = code_of_word8(codes, static_cast<int>(of_step / 16 * 4 + of_step % 4));
    return std::ldexp(E2M1{static_cast<std::uint8_t>(code)}.value() * row_scale, block.exponents[r][k / 32]);
  }
  const auto& block = reinterpret_cast<const ScaledBlock8*>(data + layout.blocks)[number];
  const std::uint32_t codes = block.codes[k / 64][thread + of_step / 8][word];
  const unsigned code = exchanged(code_of_word8(codes, static_cast<int>(of_step % 8)));
  const unsigned bits = block.scales[r][k / 64][of_step / 16][k / 32 % 2] & 0x7fu;
  return E4M3::nearest(E2M1{static_cast<std::uint8_t>(code)}.value() * kE4M3Values[bits]).value() * row_scale;
}

void pack_codes(const Matrix& m, bool gated, std::byte* blocks, float* row_scales, Executor& executor) {
  const BlockLayout layout = block_layout(m.format);
  const Element element = m.format.element;
  const std::int64_t columns = (m.K + layout.columns - 1) / layout.columns;
  const bool wide = bits_of(element) == 8;
  const float* const of_rows = m.format.group == 0 ? static_cast<const float*>(m.scales) : nullptr;
  for (std::int64_t place = 0; place < blocks_of_rows(m.N) * kBlockRows; ++place) {
    const std::int64_t row = row_at(place, gated);
    row_scales[place] = row >= m.N ? 0.0f : of_rows != nullptr ? of_rows[row] : 1.0f / lookup_factor(element);
  }
  const auto code = [&](std::int64_t place, std::int64_t column) -> unsigned {
    const std::int64_t row = row_at(place, gated);
    const bool exists = row < m.N && column < m.K;
    if (!wide) return exists ? code_at(m, row, column) : 0;
    const unsigned found = exists ? m.codes[row * m.row_bytes + column] : 0;
    return element == Element::int8 ? found ^ 0x80 : found;
  };
  // Of register i the codes of its two columns, at bits `low` and `high` of a word.
  const auto pair = [&](std::int64_t place, std::int64_t column, int i, int low, int high) {
    const std::int64_t row = place + i % 2 * 8, first = column + i / 2 * 8;
    return static_cast<std::uint32_t>(code(row, first)) << low | static_cast<std::uint32_t>(code(row, first + 1))
                                                                     << high;
  };
  for_each_thread(
      m, executor,
      [&](std::int64_t block, int t, std::int64_t place) {
        auto& codes = *reinterpret_cast<FragmentCodes*>(blocks + block * layout.bytes);
        for (int step = 0; step < layout.columns / 16; ++step) {
          const std::int64_t column = block % columns * layout.columns + step * 16 + 2 * (t % 4);
          for (int i = 0; i < 4; ++i) {
            std::uint32_t& word =
                wide ? codes.words[step / 2][t][step % 2 * 2 + i / 2] : codes.words[step / 4][t][step % 4];
            const int low = wide ? i % 2 * 16 : element == Element::int4 ? 4 * i : 8 * i;
            const int high = low + (wide ? 8 : element == Element::int4 ? 16 : 4);
            if (wide ? i % 2 == 0 : i == 0) word = 0;
            word |= pair(place, column, i, low, high);
          }
        }
      },
      layout.columns);
  if (layout.groups == 0) return;
  const std::int64_t width = layout.columns / layout.groups, scale_bytes = m.format.scale == ScaleType::f32 ? 4 : 2;
  parallel_for(executor, blocks_of_rows(m.N), [&](std::int64_t b, int /*worker*/) {
    for (std::int64_t k = 0; k < columns; ++k) {
      std::byte* const to = blocks + (b * columns + k) * layout.bytes;
      std::memset(to + layout.scales, 0, static_cast<std::size_t>(layout.bytes - layout.scales));
      for (std::int64_t g = 0; g < layout.groups; ++g) {
        const std::int64_t group = (k * layout.columns + g * width) / m.group;
        if (group >= m.groups) break;
        for (std::int64_t r = 0; r < kBlockRows; ++r) {
          const std::int64_t row = row_at(b * kBlockRows + r, gated);
          if (row >= m.N) continue;
          const std::int64_t from = row * m.groups + group, at = g * kBlockRows + r;
          std::memcpy(to + layout.scales + at * scale_bytes,
                      static_cast<const std::byte*>(m.scales) + from * scale_bytes,
                      static_cast<std::size_t>(scale_bytes));
          if (m.zeros != nullptr) to[layout.zeros + at] = static_cast<std::byte>(m.zeros[from]);
        }
      }
    }
  });
}

}  // namespace heddle::lowbit
