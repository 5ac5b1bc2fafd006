// A view as an operand of a problem.
#pragma once

#include <cstdint>

#include "core/check.h"
#include "problem/attention.h"

namespace heddle {

// Of a checked view [batch, row, head, dim], or packed [row, head, dim].
inline Operand operand_of(const TensorView& view) {
  const int row = view.rank - 3;
  Operand x;
  x.data = static_cast<std::byte*>(view.data);
  x.dtype = view.dtype;
  x.given = true;
  x.alignment = static_cast<std::uint16_t>(alignment_of(view));
  x.stride_b = row == 0 ? 0 : view.stride[0];
  x.stride_s = view.stride[row];
  x.stride_h = view.stride[row + 1];
  // A single element has neighbours in no direction, and its stride, which may be any number, says nothing.
  x.stride_d = view.shape[row + 2] > 1 ? view.stride[row + 2] : 1;
  return x;
}

}  // namespace heddle
