// Packing a block of keys or values as the A operand of the matrix product, whatever their dtype, strides or pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/plan.h"
#include "cpu/unit-inl.h"
#include "cpu/widened_keys-inl.h"
#include "problem/attention.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// Rows [begin, begin + count) of k, as they lie: out[j][d] in words, d padded with zeros, rows up to `padded_rows`
// zero.
template <Unit U>
void PackRows(const AttentionProblem& p, const Operand& x, std::int64_t width, std::int64_t padded, std::int64_t b,
              const Sequence& s, std::int64_t head, std::int64_t begin, std::int64_t count, std::int64_t padded_rows,
              typename U::Word* HWY_RESTRICT out) {
  const std::int64_t row_words = Words<U>(padded);
  if constexpr (std::is_same_v<typename U::Element, float>) {
    if (widened(p)) KeyWidener(p, b, s, head).load(&x == &p.v, begin, count, padded, out);
  }
  for (std::int64_t j = 0; j < count && !widened(p); ++j) {
    U::PackRow(x, p.key_row(x, b, s, begin + j, head), width, padded,
               reinterpret_cast<typename U::Element*>(out + j * row_words));
  }
  std::memset(out + count * row_words, 0, static_cast<std::size_t>((padded_rows - count) * row_words) * sizeof(*out));
}

// Rows [begin, begin + count) of x as panels; padded columns and padded_rows are zero-filled. Returns whether a value
// is infinite or NaN. line: U::kDepth * padded f32.
template <Unit U>
bool PackPanels(const AttentionProblem& p, const Operand& x, std::int64_t width, std::int64_t padded, std::int64_t b,
                const Sequence& s, std::int64_t head, std::int64_t begin, std::int64_t count, std::int64_t padded_rows,
                typename U::Word* out, float* HWY_RESTRICT line) {
  using Element = typename U::Element;
  auto* rows = reinterpret_cast<Element*>(line);
  typename U::PanelPacker panels(padded, padded_rows, out);
  for (std::int64_t j = 0; j < padded_rows; j += U::kDepth) {
    for (std::int64_t k = 0; k < U::kDepth; ++k) {
      Element* row = rows + k * padded;
      if (j + k < count && widened(p)) {
        if constexpr (std::is_same_v<Element, float>) {
          KeyWidener(p, b, s, head).load(&x == &p.v, begin + j, 1, padded, row);
        }
      } else if (j + k < count) {
        U::PackRow(x, p.key_row(x, b, s, begin + j + k, head), width, padded, row);
      } else {
        std::memset(row, 0, static_cast<std::size_t>(padded) * sizeof(Element));
      }
    }
    panels.put(reinterpret_cast<const typename U::Word*>(rows), j);
  }
  return panels.non_finite();
}

// The same from rows that PackRows packed.
template <Unit U>
bool PanelsFromRows(const typename U::Word* rows, std::int64_t padded, std::int64_t padded_rows,
                    typename U::Word* out) {
  typename U::PanelPacker panels(padded, padded_rows, out);
  for (std::int64_t j = 0; j < padded_rows; j += U::kDepth) panels.put(rows + Words<U>(j * padded), j);
  return panels.non_finite();
}

// Spreads the fetching of a block of keys and values over the products on the block before: packing it would otherwise
// wait for memory.
class Prefetcher {
 public:
  // Over `calls` calls of some().
  Prefetcher(const AttentionProblem& p, std::int64_t b, const Sequence& s, std::int64_t head, KeyRange keys,
             std::int64_t calls)
      : p_(p), s_(s), b_(b), head_(head), begin_(keys.begin), rows_(p.int4 ? 0 : keys.size() * 2), calls_(calls) {}

  HWY_INLINE void some() {
    for (due_ += rows_; due_ >= calls_; due_ -= calls_) {
      if (next_ >= rows_) return;
      const Operand& x = next_ % 2 == 0 ? p_.k : p_.v;
      const std::int64_t width = next_ % 2 == 0 ? p_.D : p_.Dv;
      const std::byte* row = p_.key_row(x, b_, s_, begin_ + next_ / 2, head_);
      const std::int64_t bytes = x.stride_d == 1 ? width * static_cast<std::int64_t>(size_of(x.dtype)) : 1;
      for (std::int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
      ++next_;
    }
  }

 private:
  const AttentionProblem& p_;
  const Sequence& s_;
  const std::int64_t b_, head_, begin_, rows_, calls_;
  std::int64_t next_ = 0, due_ = 0;
};

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
