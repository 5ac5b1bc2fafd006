// Which keys a row of an area attends, as positions, and how many pairs that makes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "heddle/distributed.h"

namespace heddle::distributed {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  if (b == 1) return a;  // nearly all steps are 1, and plans of many ranks have many runs
  return a > 0 ? (a + b - 1) / b : -(-a / b);
}
constexpr std::int64_t floor_div(std::int64_t a, std::int64_t b) { return -ceil_div(-a, b); }

// Positions first, first + step, ..., `count` of them.
struct Line {
  std::int64_t first, step, count;
  std::int64_t last() const { return first + step * (count - 1); }
};

// Of an area: row i stands at i - q_begin + shift, key j at j - key_begin, and a row attends keys from `least` to
// `most` behind it.
struct Band {
  std::int64_t least, most, shift;

  explicit Band(const Area& a)
      : least(a.window_left >= 0 ? -a.window_left : -kOpen),
        most(a.causal != Causal::none ? 0
             : a.window_right >= 0    ? a.window_right
                                      : kOpen),
        shift(a.causal == Causal::top_left ? 0 : (a.key_end - a.key_begin) - (a.q_end - a.q_begin)) {}

  // The part of the keys that some of the rows attend; of the rows those that attend any key between the ends of it.
  Line keys_met(const Line& rows, const Line& keys) const {
    return within(keys, rows.first + least, rows.last() + most);
  }
  Line rows_that_meet(const Line& rows, const Line& keys) const {
    return within(rows, keys.first - most, keys.last() - least);
  }
  double pairs(const Line& rows, const Line& keys) const;

 private:
  // Far beyond every position, and far from where sums would overflow.
  static constexpr std::int64_t kOpen = std::int64_t{1} << 40;
  static Line within(const Line& line, std::int64_t from, std::int64_t to) {
    const std::int64_t begin = std::clamp<std::int64_t>(ceil_div(from - line.first, line.step), 0, line.count);
    const std::int64_t end = std::clamp<std::int64_t>(floor_div(to - line.first, line.step) + 1, begin, line.count);
    return {line.first + line.step * begin, line.step, end - begin};
  }
};

// The sum over x of clamp(at x, 0, most).
inline std::int64_t clamped_sum(const Line& line, std::int64_t most) {
  const std::int64_t above = std::clamp<std::int64_t>(ceil_div(-line.first, line.step), 0, line.count);
  const std::int64_t full = std::clamp<std::int64_t>(ceil_div(most - line.first, line.step), above, line.count);
  const std::int64_t between = full - above;
  return between * (line.first + line.step * above) + line.step * (between * (between - 1) / 2) +
         most * (line.count - full);
}

inline double Band::pairs(const Line& rows, const Line& keys) const {
  if (rows.count == 0 || keys.count == 0) return 0;
  if (keys.step == 1) {  // keys up to `most` behind a row, less those before `least`
    const auto up_to = [&](std::int64_t distance) {
      return clamped_sum({rows.first + distance - keys.first, rows.step, rows.count}, keys.count);
    };
    return static_cast<double>(up_to(most + 1) - up_to(least));
  }
  double sum = 0;
  for (std::int64_t n = 0; n < rows.count; ++n) {
    const Line row{rows.first + rows.step * n, 1, 1};
    sum += static_cast<double>(keys_met(row, keys).count);
  }
  return sum;
}

inline Line row_line(const Area& a, std::int64_t begin, std::int64_t step, std::int64_t count) {
  return {begin - a.q_begin + Band(a).shift, step, count};
}
inline Line key_line(const Area& a, std::int64_t begin, std::int64_t step, std::int64_t count) {
  return {begin - a.key_begin, step, count};
}

}  // namespace heddle::distributed
