// Order::balanced: parts of rows dealt to the rank with the fewest pairs that has room, the largest first; then rows of
// the fullest rank are exchanged for as many of the emptiest as long as that helps.
#include <algorithm>
#include <cmath>
#include <deque>
#include <tuple>
#include <utility>

#include "distributed/bands.h"
#include "distributed/orders.h"

namespace heddle::distributed {
namespace {

constexpr std::int64_t kPartsOfARank = 16;
constexpr double kEven = 0.999;  // a balance that is good enough

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
  void drop(std::size_t n) {
    room += parts[n].count;
    pairs -= parts[n].pairs;
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(n));
  }
};

class Solver {
 public:
  Solver(const Problem& problem, const std::vector<Area>& areas)
      : problem_(problem),
        pairs_(areas),
        loads_(static_cast<std::size_t>(problem.ranks),
               Load{.parts = {}, .room = ceil_div(problem.rows, problem.ranks)}) {}

  std::vector<Load> solve() {
    deal();
    for (std::int64_t n = 0; n < kPartsOfARank * problem_.ranks; ++n) {
      const auto [empty, full] = std::ranges::minmax_element(loads_, {}, &Load::pairs);
      double sum = 0;
      for (const Load& load : loads_) sum += load.pairs;
      if (sum >= kEven * full->pairs * problem_.ranks || !exchange_best(*full, *empty)) break;
    }
    return std::move(loads_);
  }

 private:
  Part part(std::int64_t begin, std::int64_t count) const { return {begin, count, pairs_(begin, begin + count)}; }

  // Short documents stay together up to `most` rows; longer ones are cut evenly.
  std::vector<Part> cut_rows(std::int64_t most) const {
    std::vector<std::int64_t> ends = problem_.cu_seqlens;
    if (ends.empty()) ends = {0, problem_.rows};
    std::vector<Part> parts;
    std::int64_t begin = 0;  // of the part that is being filled
    const auto close = [&](std::int64_t end) {
      if (begin < end) parts.push_back(part(begin, end - begin));
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
    close(problem_.rows);
    return parts;
  }

  void deal() {
    std::vector<Part> cut =
        cut_rows(std::max<std::int64_t>(ceil_div(ceil_div(problem_.rows, problem_.ranks), kPartsOfARank), 1));
    std::ranges::stable_sort(cut, std::ranges::greater(), &Part::pairs);
    std::deque<Part> left(cut.begin(), cut.end());
    while (!left.empty()) {
      const Part next = left.front();
      left.pop_front();
      if (Load* const to = emptiest(next.count)) {
        to->take(next);
        continue;
      }
      // Nobody has room for all of it.
      Load& to = *emptiest(1);
      const std::int64_t taken = to.room;
      to.take(part(next.begin, taken));
      left.push_front(part(next.begin + taken, next.count - taken));
    }
  }

  // Of the ranks with room for so many rows; null: there is none.
  Load* emptiest(std::int64_t rows) {
    Load* out = nullptr;
    for (Load& load : loads_) {
      if (load.room >= rows && (out == nullptr || load.pairs < out->pairs)) out = &load;
    }
    return out;
  }

  // The first or the last rows of a part of each rank, as many of either, whose exchange brings the two nearest to each
  // other. What is left of the longer part stays.
  bool exchange_best(Load& full, Load& empty) {
    const double gap = full.pairs - empty.pairs;
    double best = gap;
    std::size_t best_out = 0, best_in = 0;
    bool best_last = false, found = false;
    for (std::size_t out = 0; out < full.parts.size(); ++out) {
      for (std::size_t in = 0; in < empty.parts.size(); ++in) {
        const std::int64_t count = std::min(full.parts[out].count, empty.parts[in].count);
        for (const bool last : {false, true}) {
          const double moved = end_of(full.parts[out], count, last).pairs - end_of(empty.parts[in], count, last).pairs;
          const double left = std::abs(gap - 2 * moved);
          // What is cut makes one call more: it must be worth that.
          const bool cut = full.parts[out].count != empty.parts[in].count;
          if (left < (cut ? best * 0.9 : best)) {
            best = left, best_out = out, best_in = in, best_last = last, found = true;
          }
        }
      }
    }
    if (!found) return false;
    const Part out = full.parts[best_out], in = empty.parts[best_in];
    const std::int64_t count = std::min(out.count, in.count);
    full.drop(best_out);
    empty.drop(best_in);
    for (const auto& [whole, from, to] : {std::tuple{&out, &full, &empty}, {&in, &empty, &full}}) {
      to->take(end_of(*whole, count, best_last));
      if (whole->count > count) from->take(end_of(*whole, whole->count - count, !best_last));
    }
    return true;
  }

  // The first rows of a part, or the last.
  Part end_of(const Part& whole, std::int64_t count, bool last) const {
    if (count == whole.count) return whole;
    return part(last ? whole.begin + whole.count - count : whole.begin, count);
  }

  const Problem& problem_;
  const PairCounter pairs_;
  std::vector<Load> loads_;
};

}  // namespace

std::vector<std::vector<Run>> balanced_rows(const Problem& problem, const std::vector<Area>& areas) {
  std::vector<std::vector<Run>> out;
  for (Load& load : Solver(problem, areas).solve()) {
    std::ranges::sort(load.parts, {}, &Part::begin);
    std::vector<Run>& runs = out.emplace_back();
    for (const Part& part : load.parts) runs.push_back({.begin = part.begin, .count = part.count});
  }
  return out;
}

}  // namespace heddle::distributed
