#include "distributed/orders.h"

#include <algorithm>

#include "distributed/bands.h"
#include "distributed/cuts.h"

namespace heddle::distributed {
namespace {

// Zigzag over rows [begin, begin + length). turn: which rank begins.
void deal_zigzag(std::int64_t begin, std::int64_t length, int turn, std::vector<std::vector<Run>>& out) {
  const auto ranks = static_cast<std::int64_t>(out.size());
  for (std::int64_t part = 0; part < 2 * ranks; ++part) {
    const std::int64_t from = part * length / (2 * ranks), to = (part + 1) * length / (2 * ranks);
    const std::int64_t rank = (std::min(part, 2 * ranks - 1 - part) + turn) % ranks;
    if (from < to) out[static_cast<std::size_t>(rank)].push_back({.begin = begin + from, .count = to - from});
  }
}

// The runs cut at documents and put into waves, each run into the first whose keys all lie before its own; then wave
// after wave, joined.
std::vector<Run> in_waves(const std::vector<Run>& runs, const std::vector<Area>& areas) {
  struct Cut {
    Run run;
    std::int64_t key_begin, key_end;
  };
  std::vector<Cut> cuts;
  for (std::size_t n = 0; n < areas.size(); ++n) {
    const Area& area = areas[n];
    const Band band(area);
    for (const Run& run : inside(runs, area.q_begin, area.q_end)) {
      const Line rows = row_line(area, run.begin, run.step, run.count);
      const Line keys = band.keys_met(rows, {0, 1, area.key_end - area.key_begin});
      cuts.push_back({run, area.key_begin + keys.first, area.key_begin + keys.first + keys.count});
    }
  }
  std::ranges::sort(cuts, {}, [](const Cut& cut) { return cut.run.begin; });
  std::vector<std::int64_t> ends;  // of each wave's keys
  for (Cut& cut : cuts) {
    const auto wave = std::ranges::find_if(ends, [&](std::int64_t end) { return end <= cut.key_begin; });
    cut.run.wave = static_cast<int>(wave - ends.begin());
    if (wave == ends.end()) {
      ends.push_back(cut.key_end);
    } else {
      *wave = cut.key_end;
    }
  }
  std::ranges::stable_sort(cuts, {}, [](const Cut& cut) { return cut.run.wave; });
  std::vector<Run> out;
  for (const Cut& cut : cuts) out.push_back(cut.run);
  return joined(out);
}

}  // namespace

PairCounter::PairCounter(const std::vector<Area>& areas) : areas_(areas), ascending_(true) {
  for (std::size_t n = 1; n < areas.size(); ++n) {
    ascending_ = ascending_ && areas[n - 1].q_end <= areas[n].q_begin;
  }
}

double PairCounter::operator()(std::int64_t begin, std::int64_t end) const {
  double sum = 0;
  auto area = areas_.begin();
  if (ascending_) area = std::ranges::partition_point(areas_, [&](const Area& a) { return a.q_end <= begin; });
  for (; area != areas_.end() && !(ascending_ && area->q_begin >= end); ++area) {
    const std::int64_t from = std::max(begin, area->q_begin), to = std::min(end, area->q_end);
    if (from >= to) continue;
    sum += Band(*area).pairs(row_line(*area, from, 1, to - from), {0, 1, area->key_end - area->key_begin});
  }
  return sum;
}

std::vector<Run> joined(const std::vector<Run>& runs) {
  std::vector<Run> out;
  for (const Run& run : runs) {
    if (!out.empty() && out.back().wave == run.wave && out.back().step == run.step &&
        out.back().begin + out.back().step * out.back().count == run.begin) {
      out.back().count += run.count;
    } else {
      out.push_back(run);
    }
  }
  return out;
}

std::vector<std::vector<Run>> dealt_rows(const Problem& problem, const std::vector<Area>& areas) {
  const std::int64_t rows = problem.rows, ranks = problem.ranks;
  std::vector<std::vector<Run>> out(static_cast<std::size_t>(ranks));
  switch (problem.order) {
    case Order::contiguous:
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        const std::int64_t from = rank * rows / ranks, to = (rank + 1) * rows / ranks;
        if (from < to) out[static_cast<std::size_t>(rank)].push_back({.begin = from, .count = to - from});
      }
      break;
    case Order::zigzag:
      deal_zigzag(0, rows, 0, out);
      break;
    case Order::striped:
      for (std::int64_t rank = 0; rank < std::min(rows, ranks); ++rank) {
        out[static_cast<std::size_t>(rank)].push_back(
            {.begin = rank, .step = ranks, .count = (rows - rank + ranks - 1) / ranks});
      }
      break;
    case Order::per_document:
      for (std::size_t n = 0; n < areas.size(); ++n) {
        deal_zigzag(areas[n].q_begin, areas[n].q_end - areas[n].q_begin, static_cast<int>(n % out.size()), out);
      }
      break;
    case Order::balanced:
      out = balanced_rows(problem, areas);
      break;
  }
  for (std::vector<Run>& runs : out) runs = arranged(runs, problem, areas);
  return out;
}

std::vector<Run> arranged(const std::vector<Run>& runs, const Problem& problem, const std::vector<Area>& areas) {
  std::vector<Run> out = joined(runs);
  // Areas that were given may share rows, and leave some out: their rows stay as they are.
  if (problem.areas.empty()) out = in_waves(out, areas);
  std::int64_t local = 0;
  for (Run& run : out) {
    run.local = local;
    local += run.count;
  }
  return out;
}

}  // namespace heddle::distributed
