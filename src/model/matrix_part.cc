#include "model/matrix_part.h"

#include <cstring>

namespace heddle {
namespace {

using distributed::Range;

// Rows of `columns` elements of `size` bytes.
void copy_part(const std::byte* from, std::int64_t columns, std::size_t size, const std::vector<Range>& rows,
               const Range& kept, std::byte* to) {
  const std::size_t bytes = size * static_cast<std::size_t>(kept.size());
  for (const Range& range : rows) {
    for (std::int64_t row = range.begin; row < range.end; ++row, to += bytes) {
      std::memcpy(to, from + size * static_cast<std::size_t>(row * columns + kept.begin), bytes);
    }
  }
}

}  // namespace

std::int64_t MatrixPart::row_count() const {
  std::int64_t count = 0;
  for (const Range& range : rows) count += range.size();
  return count;
}

std::vector<float> part_of(const std::vector<float>& matrix, std::int64_t columns, const MatrixPart& part) {
  std::vector<float> out(static_cast<std::size_t>(part.row_count() * part.columns.size()));
  copy_part(reinterpret_cast<const std::byte*>(matrix.data()), columns, sizeof(float), part.rows, part.columns,
            reinterpret_cast<std::byte*>(out.data()));
  return out;
}

std::int64_t stored_together(const lowbit::Format& format) {
  if (format.group > 0) return format.group;
  constexpr std::int64_t kTwo = 2;
  return kTwo / lowbit::storage(format, 1, kTwo).codes.shape[1];
}

OwnedMatrix part_of(const lowbit::QuantizedMatrix& matrix, const MatrixPart& part) {
  OwnedMatrix out(matrix.format, part.row_count(), part.columns.size());
  const auto copy = [&](const TensorView& from, const TensorView& to) {
    if (!from.given()) return;
    // A stored column stands for `each` of W's; one that stands for all is every part's.
    const std::int64_t stored = from.shape[1], each = (matrix.columns + stored - 1) / stored;
    const Range kept =
        stored == 1 ? Range{0, 1} : Range{part.columns.begin / each, (part.columns.end + each - 1) / each};
    copy_part(static_cast<const std::byte*>(from.data), stored, size_of(from.dtype), part.rows, kept,
              static_cast<std::byte*>(to.data));
  };
  copy(matrix.codes, out.matrix.codes);
  copy(matrix.scales, out.matrix.scales);
  copy(matrix.zeros, out.matrix.zeros);
  if (matrix.global_scale.given()) std::memcpy(out.matrix.global_scale.data, matrix.global_scale.data, sizeof(float));
  return out;
}

}  // namespace heddle
