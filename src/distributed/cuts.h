// A rank's runs cut at areas.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "distributed/bands.h"

namespace heddle::distributed {

// The parts in [from, to) of runs that ascend and share no row. Runs of steps lie in one another, all of one step.
inline std::vector<Run> inside(std::span<const Run> runs, std::int64_t from, std::int64_t to) {
  const auto end = [](const Run& run) { return run.begin + run.step * (run.count - 1) + 1; };
  std::vector<Run> out;
  auto run = runs.begin();
  if (!runs.empty() && run->step == 1) {
    run = std::ranges::partition_point(runs, [&](const Run& r) { return end(r) <= from; });
  }
  for (; run != runs.end() && run->begin < to; ++run) {
    const std::int64_t first = std::max<std::int64_t>(ceil_div(from - run->begin, run->step), 0);
    const std::int64_t last = std::min(ceil_div(to - run->begin, run->step), run->count);
    if (first >= last) continue;
    out.push_back({run->begin + run->step * first, run->step, last - first, run->local + first, run->wave});
  }
  return out;
}

// For each area the parts of a rank's runs among its rows, or among its keys.
class Cuts {
 public:
  enum class Side : std::uint8_t { rows, keys };
  Cuts(std::vector<Run> runs, const std::vector<Area>& areas, Side side) : first_{0} {
    std::ranges::sort(runs, {}, &Run::begin);
    for (const Area& area : areas) {
      const bool rows = side == Side::rows;
      const auto parts = inside(runs, rows ? area.q_begin : area.key_begin, rows ? area.q_end : area.key_end);
      parts_.insert(parts_.end(), parts.begin(), parts.end());
      first_.push_back(parts_.size());
    }
  }
  std::span<const Run> of(std::size_t area) const {
    return std::span(parts_).subspan(first_[area], first_[area + 1] - first_[area]);
  }

 private:
  std::vector<Run> parts_;
  std::vector<std::size_t> first_;
};

}  // namespace heddle::distributed
