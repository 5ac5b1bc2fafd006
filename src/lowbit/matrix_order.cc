#include "lowbit/matrix_order.h"

#include <algorithm>
#include <cstring>

#include "lowbit/formats.h"

namespace heddle::lowbit {
namespace {

constexpr std::int64_t round_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }

std::int64_t scale_bytes(const Format& format) { return static_cast<std::int64_t>(size_of(scale_dtype(format.scale))); }

// Columns 2 j in the low halves.
std::uint8_t low_first(const Matrix& m, std::uint8_t byte) {
  const NibblePair pair{byte};
  return bits_of(m.format.element) == 4 && m.format.high_nibble_first ? NibblePair::of(pair.high(), pair.low()).byte
                                                                      : byte;
}

}  // namespace

MatrixLayout matrix_layout(const Format& format, std::int64_t rows, std::int64_t columns) {
  MatrixLayout l;
  l.rows = round_up(rows, 16);
  l.groups = format.group > 0 ? columns / format.group : 1;
  l.pitch = round_up((columns * bits_of(format.element) + 7) / 8, 16);
  l.zeros = l.scales + round_up(l.rows * l.groups * scale_bytes(format), 64);
  l.codes = l.zeros + (format.zero_points ? round_up(l.rows * l.groups, 64) : 0);
  l.bytes = l.codes + l.rows * l.pitch;
  return l;
}

Matrix matrix_at(const Format& format, std::int64_t rows, std::int64_t columns, std::byte* data) {
  const MatrixLayout l = matrix_layout(format, rows, columns);
  Matrix m;
  m.format = format;
  m.format.high_nibble_first = false;
  m.N = rows;
  m.K = columns;
  m.groups = l.groups;
  m.group = format.group > 0 ? format.group : std::max<std::int64_t>(columns, 1);
  m.row_bytes = l.pitch;
  m.codes = reinterpret_cast<std::uint8_t*>(data + l.codes);
  m.scales = data + l.scales;
  if (format.zero_points) m.zeros = reinterpret_cast<std::uint8_t*>(data + l.zeros);
  if (format.global_scale) m.global_scale = reinterpret_cast<float*>(data);
  return m;
}

void pack_matrix_rows(const Matrix& from, std::int64_t begin, std::int64_t end, std::byte* data) {
  const MatrixLayout l = matrix_layout(from.format, from.N, from.K);
  const auto width = l.groups * scale_bytes(from.format);
  const auto* scales = static_cast<const std::byte*>(from.scales);
  const auto filled = [](std::byte* to, const void* bytes, std::int64_t given, std::int64_t all) {
    if (given > 0) std::memcpy(to, bytes, static_cast<std::size_t>(given));
    std::memset(to + given, 0, static_cast<std::size_t>(all - given));
  };
  for (std::int64_t n = begin; n < end; ++n) {
    const bool there = n < from.N;
    filled(data + l.scales + n * width, scales + n * width, there ? width : 0, width);
    if (from.format.zero_points) {
      filled(data + l.zeros + n * l.groups, from.zeros + n * l.groups, there ? l.groups : 0, l.groups);
    }
    auto* codes = reinterpret_cast<std::uint8_t*>(data + l.codes + n * l.pitch);
    filled(reinterpret_cast<std::byte*>(codes), from.codes + n * from.row_bytes, there ? from.row_bytes : 0, l.pitch);
    for (std::int64_t i = 0; there && i < from.row_bytes; ++i) codes[i] = low_first(from, codes[i]);
    // What pads the last byte is no weight.
    if (there && bits_of(from.format.element) == 4 && from.K % 2 != 0) codes[from.row_bytes - 1] &= 15u;
  }
}

}  // namespace heddle::lowbit
