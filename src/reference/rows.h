// Rows of operands in double precision, and where results lie: what references of attention share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/dtypes.h"
#include "problem/attention.h"

namespace heddle::reference {

using Row = std::vector<double>;

inline Row load_row(const std::byte* row, const Operand& x, std::int64_t width, double scale = 1) {
  Row out(width);
  for (std::int64_t d = 0; d < width; ++d) out[d] = scale * load_element(row, x.dtype, d * x.stride_d);
  return out;
}

inline double dot(const Row& x, const Row& y) {
  double sum = 0;
  for (std::size_t d = 0; d < x.size(); ++d) sum += x[d] * y[d];
  return sum;
}

// Rows of q (and o) and of k (and v) in natural order.
inline std::int64_t total_rows(const AttentionProblem& p) { return p.cu_seqlens_q ? p.cu_seqlens_q[p.B] : p.B * p.Sq; }
inline std::int64_t total_keys(const AttentionProblem& p) { return p.cu_seqlens_k ? p.cu_seqlens_k[p.B] : p.B * p.Sk; }

inline std::int64_t row_index(const AttentionProblem& p, std::int64_t b, const Sequence& s, std::int64_t i) {
  return p.cu_seqlens_q ? s.q_begin + i : b * p.Sq + i;
}
inline std::int64_t key_index(const AttentionProblem& p, std::int64_t b, const Sequence& s, std::int64_t j) {
  return p.cu_seqlens_k ? s.k_begin + j : b * p.Sk + j;
}
inline std::int64_t lse_index(const AttentionProblem& p, std::int64_t b, std::int64_t h, const Sequence& s,
                              std::int64_t i) {
  return p.cu_seqlens_q ? h * total_rows(p) + s.q_begin + i : (b * p.H + h) * p.Sq + i;
}

}  // namespace heddle::reference
