// A plan: checked, dealt out, counted.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "core/check.h"
#include "core/digest.h"
#include "core/names.h"
#include "distributed/orders.h"
#include "distributed/pieces.h"

namespace heddle::distributed {
namespace {

constexpr const char* kOperation = "distributed.plan";

constexpr NamedValue<Order> kOrders[] = {{"contiguous", Order::contiguous},
                                         {"zigzag", Order::zigzag},
                                         {"striped", Order::striped},
                                         {"per_document", Order::per_document},
                                         {"balanced", Order::balanced}};
constexpr NamedValue<Scheme> kSchemes[] = {{"auto", Scheme::automatic},  {"gather", Scheme::gather},
                                           {"ring", Scheme::ring},       {"needed", Scheme::needed},
                                           {"ulysses", Scheme::ulysses}, {"2d", Scheme::two_dimensional}};

constexpr int kMaxRanks = 4096;

void check_documents(const Check& check, const Problem& p) {
  if (p.cu_seqlens.empty()) return;
  check.require(p.cu_seqlens.front() == 0 && p.cu_seqlens.back() == p.rows, "cu_seqlens goes from ",
                p.cu_seqlens.front(), " to ", p.cu_seqlens.back(), ": it must go from 0 to rows, ", p.rows);
  for (std::size_t n = 1; n < p.cu_seqlens.size(); ++n) {
    check.require(p.cu_seqlens[n - 1] <= p.cu_seqlens[n], "cu_seqlens[", n, "] is ", p.cu_seqlens[n], " after ",
                  p.cu_seqlens[n - 1], ": it must never decrease");
  }
}

void check_window(const Check& check, const std::string& of, std::int64_t left, std::int64_t right) {
  check.require(left >= -1 && right >= -1, of, "window is (", left, ", ", right,
                "): each side must be 0 or more, or -1");
}

void check_areas(const Check& check, const Problem& p) {
  check.require(p.cu_seqlens.empty(), "areas and cu_seqlens are given: documents are areas of their own");
  check.require(p.causal == Causal::none && p.window_left == -1 && p.window_right == -1,
                "areas are given beside causal or window: each area has its own");
  check.require(p.order != Order::per_document, "order is per_document and areas are given: it is for documents");
  for (std::size_t n = 0; n < p.areas.size(); ++n) {
    const Area& a = p.areas[n];
    const auto inside = [&](std::int64_t begin, std::int64_t end) {
      return 0 <= begin && begin <= end && end <= p.rows;
    };
    check.require(inside(a.q_begin, a.q_end) && inside(a.key_begin, a.key_end), "areas[", n, "] has rows [", a.q_begin,
                  ", ", a.q_end, ") and keys [", a.key_begin, ", ", a.key_end, "): they must lie in [0, ", p.rows, ")");
    check_window(check, text("areas[", n, "].").c_str(), a.window_left, a.window_right);
    for (std::size_t m = 0; m < n; ++m) {
      const Area& b = p.areas[m];
      check.require(a.q_end <= b.q_begin || b.q_end <= a.q_begin || a.key_end <= b.key_begin ||
                        b.key_end <= a.key_begin || a.q_begin == a.q_end || b.q_begin == b.q_end ||
                        a.key_begin == a.key_end || b.key_begin == b.key_end,
                    "areas[", m, "] and areas[", n, "] share pairs: areas of the same rows must have other keys");
    }
  }
}

void check_problem(const Check& check, const Problem& p) {
  check.require(p.rows >= 0 && p.rows <= std::numeric_limits<std::int32_t>::max(), "rows is ", p.rows,
                ": it must be from 0 to 2^31 - 1");
  check.require(p.ranks >= 1 && p.ranks <= kMaxRanks, "ranks is ", p.ranks, ": it must be from 1 to ", kMaxRanks);
  for (const auto& [name, value] : {std::pair{"batch", p.batch},
                                    {"heads", p.heads},
                                    {"kv_heads", p.kv_heads},
                                    {"head_size", p.head_size},
                                    {"head_size_v", p.head_size_v}}) {
    check.require(value >= 1, name, " is ", value, ": it must be at least 1");
  }
  check.require(p.heads % p.kv_heads == 0, "heads is ", p.heads, " and kv_heads ", p.kv_heads,
                ": heads must be a multiple of kv_heads");
  check.require(p.dtype == DType::f32 || p.dtype == DType::f16 || p.dtype == DType::bf16, "dtype is ", name_of(p.dtype),
                ": it must be float32, float16 or bfloat16");
  check.require(p.ulysses >= 0 && (p.ulysses == 0 || p.ranks % p.ulysses == 0), "ulysses is ", p.ulysses,
                ": it must divide the ranks, ", p.ranks, ", or be 0");
  const Costs& c = p.costs;
  for (const auto& [name, value] : {std::pair{"forward_flops", c.forward_flops},
                                    {"backward_flops", c.backward_flops},
                                    {"memory_bandwidth", c.memory_bandwidth},
                                    {"link_bandwidth", c.link_bandwidth},
                                    {"network_bandwidth", c.network_bandwidth}}) {
    check.require(value > 0, name, " is ", value, ": it must be above 0");
  }
  check.require(c.link_latency >= 0, "link_latency is ", c.link_latency, ": it must not be negative");
  check.require(c.ranks_per_host >= 0, "ranks_per_host is ", c.ranks_per_host, ": it must not be negative");
  check_documents(check, p);
  check_window(check, "", p.window_left, p.window_right);
  if (!p.areas.empty()) check_areas(check, p);
}

std::vector<Area> areas_of(const Problem& p) {
  if (!p.areas.empty()) return p.areas;
  std::vector<std::int64_t> ends = p.cu_seqlens;
  if (ends.empty()) ends = {0, p.rows};
  std::vector<Area> out;
  for (std::size_t n = 0; n + 1 < ends.size(); ++n) {
    // In a square both corners are the same.
    out.push_back({ends[n], ends[n + 1], ends[n], ends[n + 1],
                   p.causal == Causal::none ? Causal::none : Causal::top_left, p.window_left, p.window_right});
  }
  return out;
}

// The largest divisor below the ranks that is no more than the kv heads, or the least above 1.
int default_ulysses(const Problem& p) {
  int found = p.ranks;
  for (int size = p.ranks - 1; size > 1; --size) {
    if (p.ranks % size != 0) continue;
    found = size;
    if (size <= p.kv_heads) break;
  }
  return found;
}

Problem checked(Problem problem) {
  check_problem(Check(kOperation), problem);
  return problem;
}

}  // namespace

const char* name_of(Order order) { return name_in(kOrders, order); }
const char* name_of(Scheme scheme) { return name_in(kSchemes, scheme); }
Order order_named(const std::string& name, const std::string& operation) {
  return value_named(kOrders, name, operation, "order");
}
Scheme scheme_named(const std::string& name, const std::string& operation) {
  return value_named(kSchemes, name, operation, "scheme");
}

Plan::Plan(Problem problem) : problem_(checked(std::move(problem))) {
  areas_ = areas_of(problem_);
  deal(dealt_rows(problem_, areas_));
}

Plan::Plan(Problem problem, std::vector<Area> areas, std::vector<std::vector<Run>> runs)
    : problem_(std::move(problem)), areas_(std::move(areas)) {
  deal(std::move(runs));
}

void Plan::deal(std::vector<std::vector<Run>> runs_of_ranks) {
  std::vector<Cuts> rows, keys;
  for (std::vector<Run>& runs : runs_of_ranks) {
    Rank rank;
    for (const Run& run : runs) rank.rows += run.count;
    rows.emplace_back(runs, areas_, Cuts::Side::rows);
    keys.emplace_back(runs, areas_, Cuts::Side::keys);
    for (std::size_t n = 0; n < areas_.size(); ++n) {
      for (const Run& run : rows.back().of(n)) {
        rank.pairs += Band(areas_[n]).pairs(row_line(areas_[n], run.begin, run.step, run.count),
                                            {0, 1, areas_[n].key_end - areas_[n].key_begin});
      }
    }
    rank.runs = std::move(runs);
    ranks_.push_back(std::move(rank));
  }
  const auto needed = [&](std::size_t hops) {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (any_piece(areas_, rows[rank], keys[(rank + ranks_.size() - hops) % ranks_.size()])) return true;
    }
    return false;
  };
  ring_hops_ = problem_.ranks - 1;
  while (ring_hops_ > 0 && !needed(static_cast<std::size_t>(ring_hops_))) --ring_hops_;

  Digest digest;
  digest.add(problem_.rows, problem_.ranks, ring_hops_);
  for (const Area& a : areas_) {
    digest.add(a.q_begin, a.q_end, a.key_begin, a.key_end, a.causal, a.window_left, a.window_right);
  }
  for (const Rank& rank : ranks_) {
    for (const Run& run : rank.runs) digest.add(run.begin, run.step, run.count, run.local);
    digest.add(rank.rows);
  }
  digest_ = digest.value();
}

double Plan::balance() const {
  double sum = 0, most = 0;
  for (const Rank& rank : ranks_) sum += rank.pairs, most = std::max(most, rank.pairs);
  return most > 0 ? sum / static_cast<double>(ranks_.size()) / most : 1;
}

std::vector<Run> Plan::needed_keys(int rank) const {
  std::vector<std::pair<std::int64_t, std::int64_t>> needed;
  const Cuts rows(runs(rank), areas_, Cuts::Side::rows);
  for (std::size_t n = 0; n < areas_.size(); ++n) {
    const Area& area = areas_[n];
    const auto need = [&](std::int64_t begin, std::int64_t count) {
      const Line keys = Band(area).keys_met(row_line(area, begin, 1, count), {0, 1, area.key_end - area.key_begin});
      if (keys.count > 0) needed.emplace_back(area.key_begin + keys.first, area.key_begin + keys.last() + 1);
    };
    for (const Run& run : rows.of(n)) {
      if (run.step == 1) {
        need(run.begin, run.count);
        continue;
      }
      // Between rows that are apart a narrow window leaves keys out.
      for (std::int64_t row = 0; row < run.count; ++row) need(run.begin + run.step * row, 1);
    }
  }
  std::ranges::sort(needed);
  std::vector<Run> out;
  std::int64_t local = 0;
  for (auto [begin, end] : needed) {
    if (!out.empty()) begin = std::max(begin, out.back().begin + out.back().count);
    if (begin >= end) continue;
    if (out.empty() || out.back().begin + out.back().count < begin) out.push_back({.begin = begin, .local = local});
    out.back().count += end - begin;
    local += end - begin;
  }
  return out;
}

std::int64_t Plan::keys_needed(int rank) const {
  std::vector<Run> own = runs(rank);
  std::ranges::sort(own, {}, &Run::begin);
  std::int64_t sum = 0;
  for (const Run& needed : needed_keys(rank)) {
    sum += needed.count;
    for (const Run& run : inside(own, needed.begin, needed.begin + needed.count)) sum -= run.count;
  }
  return sum;
}

std::vector<std::int64_t> Plan::permutation() const {
  std::vector<std::int64_t> out;
  out.reserve(static_cast<std::size_t>(problem_.rows));
  for (const Rank& rank : ranks_) {
    for (const Run& run : rank.runs) {
      for (std::int64_t n = 0; n < run.count; ++n) out.push_back(run.begin + run.step * n);
    }
  }
  return out;
}

std::vector<std::int64_t> Plan::inverse() const {
  const std::vector<std::int64_t> rows = permutation();
  std::vector<std::int64_t> out(rows.size());
  for (std::size_t n = 0; n < rows.size(); ++n) out[static_cast<std::size_t>(rows[n])] = static_cast<std::int64_t>(n);
  return out;
}

std::vector<std::int32_t> Plan::positions(int rank) const {
  const std::vector<std::int64_t>& ends = problem_.cu_seqlens;
  std::vector<std::int32_t> out;
  for (const Run& run : runs(rank)) {
    for (std::int64_t n = 0; n < run.count; ++n) {
      const std::int64_t row = run.begin + run.step * n;
      const std::int64_t begin = ends.empty() ? 0 : *std::prev(std::ranges::upper_bound(ends, row));
      out.push_back(static_cast<std::int32_t>(row - begin));
    }
  }
  return out;
}

std::vector<Piece> Plan::gather_pieces(int rank) const {
  const std::vector<Run> all = {{.count = problem_.rows}};
  return PieceMaker(areas_, rows(rank))
      .pieces(Cuts(runs(rank), areas_, Cuts::Side::rows), Cuts(all, areas_, Cuts::Side::keys));
}

std::vector<Piece> Plan::needed_pieces(int rank) const {
  return PieceMaker(areas_, rows(rank))
      .pieces(Cuts(runs(rank), areas_, Cuts::Side::rows), Cuts(needed_keys(rank), areas_, Cuts::Side::keys));
}

std::vector<std::vector<Piece>> Plan::ring_pieces(int rank) const {
  const Cuts rows_cut(runs(rank), areas_, Cuts::Side::rows);
  PieceMaker maker(areas_, rows(rank));
  std::vector<std::vector<Piece>> steps;
  for (int step = 0; step <= ring_hops_; ++step) {
    const int owner = (rank - step + problem_.ranks) % problem_.ranks;
    steps.push_back(maker.pieces(rows_cut, Cuts(runs(owner), areas_, Cuts::Side::keys)));
  }
  return steps;
}

int Plan::ulysses(Scheme scheme) const {
  if (scheme == Scheme::ulysses) return problem_.ranks;
  if (scheme != Scheme::two_dimensional) return 1;
  return problem_.ulysses > 0 ? problem_.ulysses : default_ulysses(problem_);
}

Plan Plan::grouped(int size) const {
  Check(kOperation)
      .require(size >= 1 && problem_.ranks % size == 0, "groups are of ", size, " ranks: that must divide the ranks, ",
               problem_.ranks);
  Problem problem = problem_;
  problem.ranks /= size;
  problem.ulysses = 0;
  // What groups exchange goes between ranks that stand at the same place in theirs.
  int& hosts_groups = problem.costs.ranks_per_host;
  if (hosts_groups > 0) hosts_groups = hosts_groups % size == 0 ? hosts_groups / size : 1;
  problem.heads = problem.kv_heads = 0;  // the most that a rank of a group has
  for (const HeadShare& share : head_shares(problem_.heads, problem_.kv_heads, size)) {
    problem.heads = std::max(problem.heads, share.end - share.begin);
    problem.kv_heads = std::max(problem.kv_heads, share.kv_end - share.kv_begin);
  }
  std::vector<std::vector<Run>> runs_of_groups;
  for (int group = 0; group < problem.ranks; ++group) {
    std::vector<Run> all;
    for (int rank = group * size; rank < (group + 1) * size; ++rank) {
      for (const Run& run : runs(rank)) all.push_back({.begin = run.begin, .step = run.step, .count = run.count});
    }
    std::ranges::sort(all, {}, &Run::begin);
    if (problem.ranks == 1 && problem.rows > 0) all = {{.count = problem.rows}};  // stripes too
    runs_of_groups.push_back(arranged(all, problem, areas_));
  }
  return {std::move(problem), areas_, std::move(runs_of_groups)};
}

}  // namespace heddle::distributed
