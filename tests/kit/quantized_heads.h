// Rows of q and k in 8 bits, as Precision::int8_qk has them, in plain loops.
//
// k: the mean over keys of the sequence is taken off each channel (what is not finite counts as 0 in it): all of them
// up to 256, else one of each 256th part, where 40503 n / 2^16 without its integer part says. Keys in blocks of 64,
// counted from the sequence's first; those of a block with the same j / 2 % 4 share a scale, largest |k| / 127. q: a
// scale a row. Codes are rounded to nearest. A row with an element that is not finite is NaN, and sets no scale.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace heddle::kit {

// What the codes stand for, and what was taken off.
struct QuantizedKeys {
  std::vector<std::vector<float>> rows;
  std::vector<float> mean;
};

inline bool all_finite(const std::vector<float>& row) {
  return std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); });
}

inline float largest_of(const std::vector<float>& row) {
  float largest = 0;
  for (float x : row) largest = std::max(largest, std::abs(x));
  return largest;
}

inline std::vector<float> in_codes(std::vector<float> row, float largest) {
  const bool finite = all_finite(row);
  const float scale = largest / 127;
  for (float& x : row) {
    x = finite ? (scale > 0 ? std::nearbyint(x / scale) * scale : 0) : std::numeric_limits<float>::quiet_NaN();
  }
  return row;
}

inline std::vector<float> quantized_query(const std::vector<float>& row) { return in_codes(row, largest_of(row)); }

inline QuantizedKeys quantized_keys(std::vector<std::vector<float>> rows, std::size_t width, bool smooth) {
  QuantizedKeys out;
  out.mean.assign(width, 0);
  if (smooth) {
    const std::size_t asked = std::min<std::size_t>(rows.size(), 256);
    for (std::size_t n = 0; n < asked; ++n) {
      const double part = 40503.0 * n / 65536, inside = part - std::floor(part);
      const auto& row = rows[rows.size() <= 256 ? n : static_cast<std::size_t>((n + inside) * rows.size() / 256)];
      for (std::size_t d = 0; d < width; ++d) out.mean[d] += std::isfinite(row[d]) ? row[d] : 0;
    }
    for (float& x : out.mean) x /= static_cast<float>(std::max<std::size_t>(asked, 1));
  }
  for (auto& row : rows) {
    for (std::size_t d = 0; d < width; ++d) row[d] -= out.mean[d];
  }
  const auto group = [](std::size_t j) { return j / 64 * 4 + j / 2 % 4; };
  std::vector<float> largest(rows.size() / 64 * 4 + 4);
  for (std::size_t j = 0; j < rows.size(); ++j) {
    if (all_finite(rows[j])) largest[group(j)] = std::max(largest[group(j)], largest_of(rows[j]));
  }
  for (std::size_t j = 0; j < rows.size(); ++j) out.rows.push_back(in_codes(rows[j], largest[group(j)]));
  return out;
}

}  // namespace heddle::kit
