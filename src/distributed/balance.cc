// Order::balanced: parts of rows dealt to the rank with the fewest pairs that has room, the largest first, and then
// exchanged between the fullest rank and the emptiest as long as that helps.
#include <algorithm>
#include <cmath>
#include <deque>

#include "distributed/bands.h"
#include "distributed/orders.h"

namespace heddle::distributed {
namespace {

constexpr std::int64_t kPartsOfARank = 16;

struct Part {
  std::int64_t begin, count;
  double pairs;
};

struct Load {
  std::vector<Part> parts;
  std::int64_t room;
  double pairs = 0;

  void take(const Part& part) {
    parts.push_back(part);
    room -= part.count;
    pairs += part.pairs;
  }
};

// Short documents stay together up to `most` rows; longer ones are cut evenly.
std::vector<Part> cut_rows(const Problem& problem, const std::vector<Area>& areas, std::int64_t most) {
  std::vector<std::int64_t> ends = problem.cu_seqlens;
  if (ends.empty()) ends = {0, problem.rows};
  std::vector<Part> parts;
  std::int64_t begin = 0;  // of the part that is being filled
  const auto close = [&](std::int64_t end) {
    if (begin < end) parts.push_back({begin, end - begin, pairs_of(areas, begin, end)});
    begin = end;
  };
  for (std::size_t n = 0; n + 1 < ends.size(); ++n) {
    const std::int64_t length = ends[n + 1] - ends[n];
    if (ends[n + 1] - begin <= most) continue;
    close(ends[n]);
    if (length <= most) continue;
    const std::int64_t pieces = ceil_div(length, most);
    for (std::int64_t piece = 1; piece <= pieces; ++piece) close(ends[n] + piece * length / pieces);
  }
  close(problem.rows);
  return parts;
}

// Two parts of as many rows, one of each rank, whose exchange brings the two nearest to each other.
bool exchange_best(Load& full, Load& empty) {
  const double gap = full.pairs - empty.pairs;
  Part *best_out = nullptr, *best_in = nullptr;
  double best = gap;
  for (Part& out : full.parts) {
    for (Part& in : empty.parts) {
      const double left = std::abs(gap - 2 * (out.pairs - in.pairs));
      if (out.count == in.count && left < best) best = left, best_out = &out, best_in = &in;
    }
  }
  if (best_out == nullptr) return false;
  const double moved = best_out->pairs - best_in->pairs;
  std::swap(*best_out, *best_in);
  full.pairs -= moved;
  empty.pairs += moved;
  return true;
}

}  // namespace

std::vector<std::vector<Run>> balanced_rows(const Problem& problem, const std::vector<Area>& areas) {
  const std::int64_t ranks = problem.ranks, room = ceil_div(problem.rows, ranks);
  std::vector<Part> cut = cut_rows(problem, areas, std::max<std::int64_t>(ceil_div(room, kPartsOfARank), 1));
  std::ranges::stable_sort(cut, std::ranges::greater(), &Part::pairs);
  std::deque<Part> left(cut.begin(), cut.end());
  std::vector<Load> loads(static_cast<std::size_t>(ranks), Load{.parts = {}, .room = room});
  while (!left.empty()) {
    const Part part = left.front();
    left.pop_front();
    Load* to = nullptr;
    for (Load& load : loads) {
      if (load.room >= part.count && (to == nullptr || load.pairs < to->pairs)) to = &load;
    }
    if (to != nullptr) {
      to->take(part);
      continue;
    }
    // Nobody has room for all of it: the emptiest rank with room takes what it can.
    for (Load& load : loads) {
      if (load.room > 0 && (to == nullptr || load.pairs < to->pairs)) to = &load;
    }
    const std::int64_t cut_at = part.begin + to->room, end = part.begin + part.count;
    to->take({part.begin, to->room, pairs_of(areas, part.begin, cut_at)});
    left.push_front({cut_at, end - cut_at, pairs_of(areas, cut_at, end)});
  }
  for (std::int64_t n = 0; n < kPartsOfARank * ranks; ++n) {
    const auto [empty, full] = std::ranges::minmax_element(loads, {}, &Load::pairs);
    if (!exchange_best(*full, *empty)) break;
  }
  std::vector<std::vector<Run>> out;
  for (Load& load : loads) {
    std::ranges::sort(load.parts, {}, &Part::begin);
    std::vector<Run>& runs = out.emplace_back();
    for (const Part& part : load.parts) runs.push_back({.begin = part.begin, .count = part.count});
  }
  return out;
}

}  // namespace heddle::distributed
