// Packed weights of the CPU's kernels (WeightOrder::rows16). Sixteen rows make a panel; a panel's scales, zero points
// and codes follow each other:
//   scales  [groups][16]            of the format's scale type
//   zeros   [groups][16]            u8, with zero points only
//   codes   4 bits: [K / 8][16]     u32: eight columns of a row, column k in bits 4 (k % 8) and up
//           8 bits: [K][16]         a byte each
// So a vector holds one column of several rows: no sum ever crosses lanes, and a column's codes are one shift away.
// Rows are filled up to whole panels, columns to eights, with zeros. 64 bytes in front of the panels begin with the
// f32 global scale, 1 where the format has none. All of it is aligned to 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lowbit/matrix.h"

namespace heddle::lowbit {

constexpr std::int64_t kPanelRows = 16, kPanelStep = 8;

struct PanelLayout {
  std::int64_t panels = 0, columns = 0;  // whole panels; K rounded up to eights
  std::int64_t group = 1, groups = 1;    // columns of a scale, a multiple of eight, and scales of a row
  std::int64_t scales = 0, zeros = 0, codes = 0, panel_bytes = 0;  // offsets in a panel; its size
  std::int64_t step_bytes = 0;                                     // of eight columns of a panel's codes

  static constexpr std::int64_t kHeader = 64;
  std::int64_t bytes() const { return kHeader + panels * panel_bytes; }
};

// `groups` is what storage() says.
PanelLayout panel_layout(const Format& format, std::int64_t rows, std::int64_t columns);

struct Panels {
  Format format;
  PanelLayout layout;
  const std::uint8_t* data = nullptr;

  float global_scale() const { return *reinterpret_cast<const float*>(data); }
  const std::uint8_t* panel(std::int64_t index) const {
    return data + PanelLayout::kHeader + index * layout.panel_bytes;
  }
};

// Whether codes stand for integers, or halves of them.
constexpr bool has_integers(const Format& format) {
  return format.element == Element::int8 || format.element == Element::e2m1 || format.element == Element::e2m1_row ||
         format.element == Element::int4;
}

// Writes panel `index` to `to`, which is Panels::panel(index).
void pack_panel(const Matrix& matrix, const PanelLayout& layout, std::int64_t index, std::uint8_t* to);

// W[n, k] as the format defines it.
float packed_value(const Panels& panels, std::int64_t n, std::int64_t k);

}  // namespace heddle::lowbit
