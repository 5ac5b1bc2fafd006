#include "lowbit/packed.h"

#include <algorithm>
#include <cstring>

#include "lowbit/formats.h"

namespace heddle::lowbit {
namespace {

constexpr std::int64_t round_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }

std::int64_t scale_bytes(const Format& format) { return static_cast<std::int64_t>(size_of(scale_dtype(format.scale))); }

// Eight columns of a row of 4-bit codes, the first in the low bits.
std::uint32_t word_of(const Matrix& matrix, std::int64_t n, std::int64_t k) {
  std::uint32_t word = 0;
  const std::int64_t first = k / 2, count = std::min<std::int64_t>(4, matrix.row_bytes - first);
  const std::uint8_t* from = matrix.codes + n * matrix.row_bytes + first;
  for (std::int64_t i = 0; i < count; ++i) word |= static_cast<std::uint32_t>(from[i]) << 8 * i;
  if (matrix.format.high_nibble_first) word = (word & 0x0f0f0f0fu) << 4 | (word >> 4 & 0x0f0f0f0fu);
  // What pads the last byte is no weight.
  if (matrix.K - k < kPanelStep) word &= (1u << 4 * (matrix.K - k)) - 1;
  return word;
}

}  // namespace

PanelLayout panel_layout(const Format& format, std::int64_t rows, std::int64_t columns) {
  PanelLayout l;
  l.panels = (rows + kPanelRows - 1) / kPanelRows;
  l.columns = round_up(columns, kPanelStep);
  l.group = format.group > 0 ? format.group : std::max(l.columns, kPanelStep);
  l.groups = format.group > 0 ? columns / format.group : 1;
  l.step_bytes = kPanelStep * kPanelRows * bits_of(format.element) / 8;
  l.zeros = round_up(l.groups * kPanelRows * scale_bytes(format), 64);
  l.codes = l.zeros + (format.zero_points ? round_up(l.groups * kPanelRows, 64) : 0);
  l.panel_bytes = l.codes + l.columns / kPanelStep * l.step_bytes;
  return l;
}

void pack_panel(const Matrix& matrix, const PanelLayout& layout, std::int64_t index, std::uint8_t* to) {
  std::memset(to, 0, static_cast<std::size_t>(layout.panel_bytes));
  const std::int64_t first = index * kPanelRows, rows = std::min(kPanelRows, matrix.N - first);
  const std::int64_t width = scale_bytes(matrix.format);
  const auto* scales = static_cast<const std::uint8_t*>(matrix.scales);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t g = 0; g < matrix.groups; ++g) {
      const std::int64_t from = (first + r) * matrix.groups + g, at = g * kPanelRows + r;
      std::memcpy(to + layout.scales + at * width, scales + from * width, static_cast<std::size_t>(width));
      if (matrix.format.zero_points) to[layout.zeros + at] = matrix.zeros[from];
    }
  }
  std::uint8_t* codes = to + layout.codes;
  if (bits_of(matrix.format.element) == 8) {
    for (std::int64_t k = 0; k < matrix.K; ++k) {
      for (std::int64_t r = 0; r < rows; ++r) {
        codes[k * kPanelRows + r] = matrix.codes[(first + r) * matrix.row_bytes + k];
      }
    }
    return;
  }
  for (std::int64_t k = 0; k < matrix.K; k += kPanelStep) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::uint32_t word = word_of(matrix, first + r, k);
      std::memcpy(codes + (k / kPanelStep * kPanelRows + r) * 4, &word, 4);
    }
  }
}

float packed_value(const Panels& panels, std::int64_t n, std::int64_t k) {
  const Format& format = panels.format;
  const PanelLayout& l = panels.layout;
  const std::uint8_t* panel = panels.panel(n / kPanelRows);
  const std::int64_t r = n % kPanelRows, at = k / l.group * kPanelRows + r;
  float scale = load_scale(panel + l.scales, format.scale, at);
  if (format.global_scale) scale = scale * panels.global_scale();
  const float zero = format.zero_points ? static_cast<float>(panel[l.zeros + at]) : kInt4Zero;
  unsigned code = 0;
  if (bits_of(format.element) == 8) {
    code = panel[l.codes + k * kPanelRows + r];
  } else {
    std::uint32_t word = 0;
    std::memcpy(&word, panel + l.codes + (k / kPanelStep * kPanelRows + r) * 4, 4);
    code = word >> 4 * (k % kPanelStep) & 15u;
  }
  return value_of(format.element, static_cast<std::uint8_t>(code), zero) * scale;
}

}  // namespace heddle::lowbit
