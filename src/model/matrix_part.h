// Parts of weight matrices, as ranks that share a layer have them.
#pragma once

#include <cstdint>
#include <vector>

#include "heddle/distributed_block.h"
#include "heddle/lowbit.h"
#include "model/layer_formats.h"

namespace heddle {

// Rows in ranges, one behind the other, and columns in one.
struct MatrixPart {
  std::vector<distributed::Range> rows;
  distributed::Range columns;

  std::int64_t row_count() const;
};

// Of a matrix of so many columns, row after row, those that the part has.
std::vector<float> part_of(const std::vector<float>& matrix, std::int64_t columns, const MatrixPart& part);

// Columns of W that a format stores together: a group that has a scale, or those of a byte.
std::int64_t stored_together(const lowbit::Format& format);
// Codes and scales as they are. The part's columns begin at multiples of stored_together(), and end at one or at the
// last.
OwnedMatrix part_of(const lowbit::QuantizedMatrix& matrix, const MatrixPart& part);

}  // namespace heddle
