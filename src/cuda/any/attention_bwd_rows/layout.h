// How the rows lie that the kernels write, for every backward that reads them.
#pragma once

#include "problem/attention.h"

namespace heddle::cuda::any::attention_bwd_rows {

// Rows are stored head by head, [H][rows_per_head]; a sequence's begin at a multiple of kRowTile, and what is stored of
// it goes on to the next: tiles of up to kRowTile rows can be copied whole, in pieces of 16 bytes.
constexpr std::int64_t kRowTile = 128;

constexpr std::int64_t round_up_to_tile(std::int64_t rows) { return (rows + kRowTile - 1) / kRowTile * kRowTile; }

// Without reading index data.
constexpr std::int64_t rows_per_head(const AttentionProblem& p) {
  return p.cu_seqlens_q.given ? round_up_to_tile(p.q_rows + kRowTile * p.B) : p.B * round_up_to_tile(p.Sq);
}

// dO that comes in f32 beside operands of 16 bits is rounded to theirs, as products take it.
constexpr bool rounds_d_o(const AttentionProblem& p) { return p.float32_out && p.dtype != DType::f32; }

// Where it lies then: [H][rows of all sequences][Dv, up to a multiple of 16 bytes].
inline Operand rounded_d_o(const AttentionProblem& p, std::byte* data) {
  const std::int64_t row = (p.Dv + 7) / 8 * 8, rows = p.cu_seqlens_q.given ? p.q_rows : p.B * p.Sq;
  return {.data = data,
          .dtype = p.dtype,
          .given = true,
          .alignment = 16,
          .stride_b = p.cu_seqlens_q.given ? 0 : p.Sq * row,
          .stride_s = row,
          .stride_h = rows * row,
          .stride_d = 1};
}
constexpr std::int64_t rounded_d_o_bytes(const AttentionProblem& p) {
  return rounds_d_o(p) ? p.H * rounded_d_o(p, nullptr).stride_h * static_cast<std::int64_t>(size_of(p.dtype)) : 0;
}

// Of sequence b in a head. of_sequence: round_up_to_tile(p.Sq).
constexpr std::int64_t first_row(const AttentionProblem& p, std::int64_t b, const Sequence& s,
                                 std::int64_t of_sequence) {
  return p.cu_seqlens_q.data ? (s.q_begin + kRowTile * b) / kRowTile * kRowTile : b * of_sequence;
}
constexpr std::int64_t first_row(const AttentionProblem& p, std::int64_t b, const Sequence& s) {
  return first_row(p, b, s, round_up_to_tile(p.Sq));
}

// Whether packed sequences lie one behind the other and are no longer than was said; asked of every `step`-th sequence
// from `first` on. Index data may say anything, and where sequences shared rows or had more tiles than there are CTAs,
// a CTA could wait for a turn that never comes.
constexpr bool lie_apart(const AttentionProblem& p, std::int64_t first, std::int64_t step) {
  const auto apart = [&](const std::int32_t* offsets, std::int64_t rows, std::int64_t longest) {
    bool all = true;
    for (std::int64_t b = first; offsets != nullptr && b < p.B; b += step) {
      const std::int64_t begin = offsets[b], end = offsets[b + 1];
      all = all && begin >= 0 && begin <= end && end <= rows && end - begin <= longest;
    }
    return all;
  };
  return apart(p.cu_seqlens_q.data, p.q_rows, p.Sq) && apart(p.cu_seqlens_k.data, p.k_rows, p.Sk);
}

}  // namespace heddle::cuda::any::attention_bwd_rows
