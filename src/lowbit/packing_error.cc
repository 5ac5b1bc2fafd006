#include "lowbit/packing_error.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/parallel.h"
#include "lowbit/formats.h"
#include "lowbit/fragment_codes.h"
#include "lowbit/fragments.h"

namespace heddle::lowbit {
namespace {

// Of the magnitudes of E2M1 under one scale: how much of each packing changes, the most, and which, a bit for each.
struct Changes {
  static constexpr unsigned kOdd = 1u << 3 | 1u << 5 | 1u << 7;  // 1.5, 3 and 6

  std::array<double, 8> of{};
  double max = 0;
  unsigned changed = 0;
  bool odd_alike = true;  // changed is kOdd, or nothing: the case of almost all scales of nvfp4

  template <class Packed>
  static Changes from(Packed packed) {
    Changes changes;
    for (unsigned code = 1; code < 8; ++code) {
      const double stored = E2M1::kMagnitudes[code];
      changes.of[code] = std::abs(packed(code) - stored) / stored;
      changes.max = std::max(changes.max, changes.of[code]);
      changes.changed |= changes.of[code] != 0 ? 1u << code : 0u;
    }
    changes.odd_alike = changes.changed == kOdd || changes.changed == 0;
    return changes;
  }
};

constexpr int kLeast = ScaledBlock8::kLeast;

double value_of(unsigned code) { return E2M1{static_cast<std::uint8_t>(code)}.value(); }

// mxfp4 in fragments8: exponent is negative.
Changes under_exponent(int exponent) {
  return Changes::from(
      [exponent](unsigned code) { return std::ldexp(value_of(under_least(code, exponent)), -exponent); });
}

// nvfp4 in fragments8, by the bits of a scale under its row's. row: the row's scale over what it should be.
Changes under_bits(int bits, double row = 1.0) {
  return Changes::from([bits, row](unsigned code) {
    const unsigned held = bits < kLeast ? under_least_bits(code, bits) : code;
    const double product = value_of(held) * value_of_wide(std::max(bits, kLeast));
    return E4M3::nearest(static_cast<float>(product)).value() * row / value_of_wide(bits);
  });
}

class BitsTable {
 public:
  BitsTable() {
    for (int bits = kBegin; bits <= ScaledBlock8::kMost; ++bits) at_[bits - kBegin] = under_bits(bits);
  }
  const Changes& operator[](int bits) const { return at_[bits - kBegin]; }

 private:
  // The least E4M3 in a row whose largest is E4M3's largest.
  static constexpr int kBegin = -16 - 24;
  std::array<Changes, ScaledBlock8::kMost + 1 - kBegin> at_{};
};

// A bit for each of 16 codes whose magnitude changes.
std::uint64_t changed_codes(std::uint64_t codes, const Changes& changes) {
  constexpr std::uint64_t kOnes = 0x1111111111111111u;
  if (changes.odd_alike) {
    const std::uint64_t odd = codes & (codes >> 1 | codes >> 2) & kOnes;
    return odd & -static_cast<std::uint64_t>(changes.changed != 0);  // a branch would be guessed wrong
  }
  std::uint64_t found = 0;
  for (unsigned magnitude = 1; magnitude < 8; ++magnitude) {
    if ((changes.changed >> magnitude & 1) == 0) continue;
    const std::uint64_t other = (codes ^ magnitude * kOnes) & 7 * kOnes;
    found |= ~(other | other >> 1 | other >> 2) & kOnes;
  }
  return found;
}

// Rows in turn.
class Tally {
 public:
  explicit Tally(const Matrix& matrix) : m_(matrix) {}

  void add(std::int64_t row, std::int64_t group, const Changes& changes) {
    int count = 0;
    for (std::int64_t k = group * m_.group; k < (group + 1) * m_.group; k += 16) {
      std::uint64_t codes = 0;
      std::memcpy(&codes, m_.codes + row * m_.row_bytes + k / 2, sizeof codes);
      count += std::popcount(changed_codes(codes, changes));
    }
    found_.changed += count;
    if (changes.max <= found_.max || count == 0) return;
    for (std::int64_t k = group * m_.group; k < (group + 1) * m_.group; ++k) {
      take(changes.of[code_at(m_, row, k) & 7], row, k);
    }
  }
  // Of rows behind these.
  void add(const PackingError& other) {
    found_.changed += other.changed;
    take(other.max, other.max_row, other.max_column);
  }
  const PackingError& found() const { return found_; }

 private:
  void take(double change, std::int64_t row, std::int64_t column) {
    if (change > found_.max) found_ = {found_.changed, change, row, column};
  }

  const Matrix& m_;
  PackingError found_;
};

void add_mxfp4(Tally& tally, const Matrix& m, std::int64_t row, WeightOrder order) {
  const auto* const scales = static_cast<const std::uint8_t*>(m.scales) + row * m.groups;
  const int largest = largest_scale(m, row);
  const Changes all_become_zero = Changes::from([](unsigned) { return 0.0; });
  for (std::int64_t g = 0; g < m.groups; ++g) {
    const int exponent = scales[g] - largest;
    if (order == WeightOrder::fragments16) {
      if (exponent < FragmentBlock::kLeastExponent) tally.add(row, g, all_become_zero);
    } else if (exponent < -FragmentBlock8::kMaxExponent) {
      tally.add(row, g, under_exponent(FragmentBlock8::kMaxExponent + exponent));
    }
  }
}

void add_nvfp4(Tally& tally, const Matrix& m, std::int64_t row, const BitsTable& table) {
  const auto* const scales = static_cast<const std::uint8_t*>(m.scales) + row * m.groups;
  const int shift = row_shift(largest_scale(m, row));
  // Not 1 where the row's scale is subnormal.
  const double of_row = std::ldexp(*m.global_scale, shift) / std::ldexp(static_cast<double>(*m.global_scale), shift);
  for (std::int64_t g = 0; g < m.groups; ++g) {
    if (scales[g] == 0) continue;
    const int bits = wide_bits(scales[g]) - 8 * shift;
    tally.add(row, g, of_row == 1.0 ? table[bits] : under_bits(bits, of_row));
  }
}

}  // namespace

PackingError packing_error(const Matrix& m, WeightOrder order, Executor& executor) {
  const bool mxfp4 = m.format.scale == ScaleType::e8m0, nvfp4 = m.format.scale == ScaleType::e4m3;
  const bool narrow = order == WeightOrder::fragments8, fragments = narrow || order == WeightOrder::fragments16;
  if (!(mxfp4 && fragments) && !(nvfp4 && narrow)) return {};
  if (nvfp4 && *m.global_scale == 0) return {};
  const BitsTable table;
  std::vector<PackingError> of_blocks(static_cast<std::size_t>(blocks_of_rows(m.N)));
  parallel_for(executor, blocks_of_rows(m.N), [&](std::int64_t block, int /*worker*/) {
    Tally tally(m);
    for (std::int64_t row = block * kBlockRows; row < std::min(m.N, (block + 1) * kBlockRows); ++row) {
      if (mxfp4) {
        add_mxfp4(tally, m, row, order);
      } else {
        add_nvfp4(tally, m, row, table);
      }
    }
    of_blocks[static_cast<std::size_t>(block)] = tally.found();
  });
  Tally tally(m);
  for (const PackingError& of_block : of_blocks) tally.add(of_block);
  return tally.found();
}

double weight_of(const Matrix& m, std::int64_t n, std::int64_t k) {
  const double scale = load_scale(m.scales, m.format.scale, n * m.groups + k / m.group);
  return value_of(code_at(m, n, k)) * scale * (m.global_scale != nullptr ? *m.global_scale : 1.0f);
}

}  // namespace heddle::lowbit
