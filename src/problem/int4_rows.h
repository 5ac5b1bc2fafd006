// A key or value of a cache in 4 bits, element by element: what the format means.
#pragma once

#include <cstring>
#include <vector>

#include "core/dtypes.h"
#include "problem/attention.h"

namespace heddle {

// zero + code * scale of element d of a block's row; Real: float rounds once, double does not.
template <class Real>
Real int4_element(const std::byte* block, const Int4Block& format, bool of_values, std::int64_t row, std::int64_t d) {
  const auto half = [&](std::int64_t at) {
    std::uint16_t bits;
    std::memcpy(&bits, block + at, 2);
    return static_cast<double>(f16_to_f32(bits));
  };
  const int bit = of_values ? format.v_bit(row, d) : format.k_bit(row, d);
  const int code = static_cast<int>(block[of_values ? format.v_code(row, d) : format.k_code(row, d)]) >> bit & 15;
  const std::int64_t group = of_values ? format.v_scale(row, d) : 2 * d;
  const double scale = half((of_values ? format.v_scales() : format.k_scales()) + group);
  return static_cast<Real>(half((of_values ? format.v_zeros() : format.k_zeros()) + group) + code * scale);
}

// Key (or value) j of sequence b.
template <class Real>
std::vector<Real> int4_row(const AttentionProblem& p, std::int64_t b, const Sequence& s, std::int64_t j,
                           std::int64_t kv_head, bool of_values) {
  const std::int64_t slot = s.k_begin + j, width = of_values ? p.Dv : p.D;
  std::vector<Real> out(static_cast<std::size_t>(width));
  if (slot / kInt4Keys < int4_blocks(s.k_begin + s.sk)) {
    const std::byte* block = p.int4_block(b, slot / kInt4Keys, kv_head);
    const Int4Block format{p.D, p.Dv};
    for (std::int64_t d = 0; d < width; ++d) {
      out[d] = int4_element<Real>(block, format, of_values, slot % kInt4Keys, d);
    }
  } else {
    const Operand& x = of_values ? p.v : p.k;
    const std::byte* row = x.at(p.int4_row(b), slot % kInt4Tail, kv_head);
    for (std::int64_t d = 0; d < width; ++d) out[d] = load_element(row, x.dtype, d * x.stride_d);
  }
  return out;
}

}  // namespace heddle
