// Packed weights for products by cuBLASLt (WeightOrder::matrix and matrix8): plain storage in one piece. 64 bytes that
// begin with the f32 global scale, 1 where the format has none; then, each aligned to 64 bytes,
//   scales  [rows][groups]  of the format's scale type
//   zeros   [rows][groups]  u8, with zero points only
//   codes   [rows][pitch]   bytes; column 2 j in the low half of a byte for 4 bits, whatever the format says
// rows are N rounded up to 16, the pitch is a row's codes rounded up to 16 bytes; what fills up is zero. So a product
// in 8 bits takes the codes as they lie.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lowbit/matrix.h"

namespace heddle::lowbit {

struct MatrixLayout {
  static constexpr std::int64_t kHeader = 64;
  std::int64_t rows = 0, groups = 1, pitch = 0;
  std::int64_t scales = kHeader, zeros = 0, codes = 0, bytes = 0;  // where they begin; the size of all
};
MatrixLayout matrix_layout(const Format& format, std::int64_t rows, std::int64_t columns);

// The matrix that lies at `data` in such an order: N and K are the weights' own, row_bytes is the pitch.
Matrix matrix_at(const Format& format, std::int64_t rows, std::int64_t columns, std::byte* data);

// Writes rows [begin, end) of the layout, which may be beyond those of the matrix.
void pack_matrix_rows(const Matrix& from, std::int64_t begin, std::int64_t end, std::byte* data);

}  // namespace heddle::lowbit
