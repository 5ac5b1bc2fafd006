// Which keys a row of queries meets by causality and window, for rows and keys that stand at even distances on one
// line. Host and device; a GPU's kernels take 32 bits.
#pragma once

#include <cstdint>
#include <limits>

namespace heddle {

// Indices begin <= i < end of rows, of keys, or of tiles of them.
template <class Int>
struct Interval {
  Int begin = 0, end = 0;

  constexpr Int size() const { return end > begin ? end - begin : 0; }
  constexpr bool empty() const { return begin >= end; }
  constexpr bool holds(Interval other) const { return begin <= other.begin && other.end <= end; }
  constexpr Interval common(Interval other) const {  // what is in both
    const Int from = begin > other.begin ? begin : other.begin, to = end < other.end ? end : other.end;
    return {from, to > from ? to : from};
  }
  constexpr bool operator==(const Interval&) const = default;
};

// The tiles of `size` indices, each from a multiple of it on, that hold some of `indices`.
template <class Int>
constexpr Interval<Int> tiles_of(Interval<Int> indices, Int size) {
  if (indices.empty()) return {};
  return {indices.begin / size, (indices.end - 1) / size + 1};
}

// Row i stands at off + row_step * i and key j at key_step * j; the two meet if the key stands at most `left` before
// the row and at most `right` behind it. Dense attention has steps of 1; rows or keys that stand for several positions
// have longer ones. Either side may be negative: with right = -1 a row meets only keys before its own place. Positions,
// and off, lie within +-(kOpen / 2), so that no sum here overflows.
template <class Int>
struct BasicBand {
  static constexpr Int kOpen = std::numeric_limits<Int>::max() / 2;  // farther than any two positions are apart

  Int off = 0;
  Int left = kOpen, right = kOpen;  // within +-kOpen
  Int rows = 0, keys = 0;           // how many there are
  Int row_step = 1, key_step = 1;   // >= 1

  constexpr Interval<Int> all_rows() const { return {0, rows}; }
  constexpr Interval<Int> all_keys() const { return {0, keys}; }

  // The keys that row i would meet if there were keys without end on both sides; where it meets none, an end before the
  // begin or there.
  constexpr Interval<Int> reach(Int i) const {
    const Int at = off + row_step * i;
    return {ceil_quotient(at - left), floor_quotient(at + right) + 1};
  }
  // The keys that row i meets, within [0, keys); where it meets none, an empty interval.
  constexpr Interval<Int> keys_of(Int i) const {
    const Interval<Int> all = reach(i);
    const Int begin = clamp(all.begin, 0, keys);
    return {begin, clamp(all.end, begin, keys)};
  }

  // From the first to the last of the keys that rows [begin, end) meet. Where rows stand farther apart than the window
  // is wide, there are keys between that none of them meets.
  constexpr Interval<Int> keys_of(Interval<Int> some) const {
    some = some.common(all_rows());
    if (some.empty()) return {};
    return ordered(keys_of(some.begin).begin, keys_of(some.end - 1).end);
  }

  // The keys that each of the rows [begin, end) meets; all keys if there is no row.
  constexpr Interval<Int> keys_of_each(Interval<Int> some) const {
    some = some.common(all_rows());
    if (some.empty()) return all_keys();
    return ordered(keys_of(some.end - 1).begin, keys_of(some.begin).end);
  }

  // Whether no pair of these rows and keys is outside the band.
  constexpr bool whole(Interval<Int> some, Interval<Int> of_keys) const {
    return of_keys.empty() || keys_of_each(some).holds(of_keys);
  }

  // The band as keys see it: its rows are this one's keys, and its keys this one's rows.
  constexpr BasicBand transposed() const { return {-off, right, left, keys, rows, key_step, row_step}; }

  // From the first to the last of the rows that meet one of these keys.
  constexpr Interval<Int> rows_of(Interval<Int> some_keys) const { return transposed().keys_of(some_keys); }

 private:
  static constexpr Int clamp(Int x, Int low, Int high) { return x < low ? low : x > high ? high : x; }
  static constexpr Interval<Int> ordered(Int begin, Int end) { return {begin, end > begin ? end : begin}; }
  constexpr Int floor_quotient(Int x) const {
    if (key_step == 1) return x;
    return x / key_step - (x % key_step < 0 ? 1 : 0);
  }
  constexpr Int ceil_quotient(Int x) const {
    if (key_step == 1) return x;
    return x / key_step + (x % key_step > 0 ? 1 : 0);
  }
};

using Band = BasicBand<std::int64_t>;
using KeyRange = Interval<std::int64_t>;

}  // namespace heddle
