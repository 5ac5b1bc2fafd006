// Plans of attention over several ranks: what they deal out, and that the pieces of each scheme have every pair of the
// mask once, found by writing both down.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "heddle/distributed.h"
#include "heddle/error.h"

namespace heddle::distributed {
namespace {

using std::int64_t;
using Pair = std::pair<int64_t, int64_t>;  // (row, key) of the whole

constexpr Order kAll[] = {Order::contiguous, Order::zigzag, Order::striped, Order::per_document, Order::balanced};

// As include/heddle/attention.h has it: `off` is 0 for top_left, else Sk - Sq.
bool attends(const Area& a, int64_t row, int64_t key) {
  if (row < a.q_begin || row >= a.q_end || key < a.key_begin || key >= a.key_end) return false;
  const int64_t off = a.causal == Causal::top_left ? 0 : (a.key_end - a.key_begin) - (a.q_end - a.q_begin);
  const int64_t distance = (key - a.key_begin) - (row - a.q_begin) - off;
  if (a.causal != Causal::none && distance > 0) return false;
  if (a.window_left >= 0 && distance < -a.window_left) return false;
  return a.window_right < 0 || distance <= a.window_right;
}

std::set<Pair> pairs_of_mask(const Plan& plan) {
  std::set<Pair> out;
  for (const Area& a : plan.areas()) {
    for (int64_t row = a.q_begin; row < a.q_end; ++row) {
      for (int64_t key = a.key_begin; key < a.key_end; ++key) {
        if (attends(a, row, key)) out.emplace(row, key);
      }
    }
  }
  return out;
}

// What a piece's call attends, its rows and keys told by where they lie.
std::vector<Pair> pairs_of_piece(const Piece& p, const std::vector<int64_t>& rows, const std::vector<int64_t>& keys) {
  std::vector<Pair> out;
  for (std::size_t n = 0; n + 1 < p.cu_seqlens_q.size(); ++n) {
    for (int64_t i = p.cu_seqlens_q[n]; i < p.cu_seqlens_q[n + 1]; ++i) {
      for (int64_t j = p.cu_seqlens_k[n]; j < p.cu_seqlens_k[n + 1]; ++j) {
        const int64_t distance = (p.key_offset[n] + p.key_step * (j - p.cu_seqlens_k[n])) -
                                 (p.q_offset[n] + p.q_step * (i - p.cu_seqlens_q[n]));
        if (p.causal == Causal::top_left && distance > 0) continue;
        if (p.window_left >= 0 && distance < -p.window_left) continue;
        if (p.window_right >= 0 && distance > p.window_right) continue;
        out.emplace_back(rows[static_cast<std::size_t>(p.q_begin + i)],
                         keys[static_cast<std::size_t>(p.key_begin + j)]);
      }
    }
  }
  return out;
}

void expect_well_formed(const Piece& p, int64_t rows, int64_t keys) {
  ASSERT_GE(p.cu_seqlens_q.size(), 2u);
  ASSERT_EQ(p.cu_seqlens_q.size(), p.cu_seqlens_k.size());
  ASSERT_EQ(p.cu_seqlens_q.size(), p.q_offset.size() + 1);
  ASSERT_EQ(p.cu_seqlens_q.size(), p.key_offset.size() + 1);
  EXPECT_NE(p.causal, Causal::bottom_right);
  EXPECT_TRUE(0 <= p.q_begin && p.q_end <= rows && 0 <= p.key_begin && p.key_end <= keys);
  EXPECT_EQ(p.cu_seqlens_q.back(), p.q_end - p.q_begin);
  EXPECT_EQ(p.cu_seqlens_k.back(), p.key_end - p.key_begin);
  int64_t longest_q = 0, longest_k = 0;
  for (std::size_t n = 0; n + 1 < p.cu_seqlens_q.size(); ++n) {
    longest_q = std::max<int64_t>(longest_q, p.cu_seqlens_q[n + 1] - p.cu_seqlens_q[n]);
    longest_k = std::max<int64_t>(longest_k, p.cu_seqlens_k[n + 1] - p.cu_seqlens_k[n]);
    EXPECT_LE(p.cu_seqlens_q[n], p.cu_seqlens_q[n + 1]);
    EXPECT_LE(p.cu_seqlens_k[n], p.cu_seqlens_k[n + 1]);
    EXPECT_TRUE(p.q_offset[n] >= 0 && p.key_offset[n] >= 0);
  }
  EXPECT_EQ(p.max_seqlen_q, longest_q);
  EXPECT_EQ(p.max_seqlen_k, longest_k);
}

std::vector<int64_t> rows_of(const Plan& plan, int rank) {
  std::vector<int64_t> out;
  for (const Run& run : plan.runs(rank)) {
    EXPECT_EQ(run.local, std::ssize(out));
    for (int64_t n = 0; n < run.count; ++n) out.push_back(run.begin + run.step * n);
  }
  EXPECT_EQ(std::ssize(out), plan.rows(rank));
  return out;
}

// Everything that a plan says, against the mask written down.
void expect_right(const Plan& plan) {
  const Problem& problem = plan.problem();
  const std::set<Pair> mask = pairs_of_mask(plan);
  std::vector<int64_t> whole(static_cast<std::size_t>(problem.rows));
  std::iota(whole.begin(), whole.end(), 0);

  std::vector<int64_t> dealt;
  std::vector<std::vector<int64_t>> rows;
  for (int rank = 0; rank < problem.ranks; ++rank) {
    rows.push_back(rows_of(plan, rank));
    dealt.insert(dealt.end(), rows.back().begin(), rows.back().end());
  }
  EXPECT_EQ(plan.permutation(), dealt);
  const std::vector<int64_t> inverse = plan.inverse();
  for (std::size_t n = 0; n < dealt.size(); ++n)
    ASSERT_EQ(inverse[static_cast<std::size_t>(dealt[n])], static_cast<int64_t>(n));
  std::ranges::sort(dealt);
  EXPECT_EQ(dealt, whole);

  std::vector<Pair> gathered, ringed, needing;
  bool last_hop_needed = plan.ring_hops() == 0;
  for (int rank = 0; rank < problem.ranks; ++rank) {
    double pairs = 0;
    std::set<int64_t> needed;
    for (const auto& [row, key] : mask) {
      const auto& own = rows[static_cast<std::size_t>(rank)];
      if (std::ranges::find(own, row) == own.end()) continue;
      ++pairs;
      if (std::ranges::find(own, key) == own.end()) needed.insert(key);
    }
    EXPECT_EQ(plan.pairs(rank), pairs);
    EXPECT_EQ(plan.keys_needed(rank), std::ssize(needed));

    double counted = 0;
    std::vector<bool> covered(rows[static_cast<std::size_t>(rank)].size());
    const auto take = [&](const Piece& piece, int64_t keys) {
      expect_well_formed(piece, std::ssize(covered), keys);
      counted += piece.pairs;
      bool first = true;
      for (int64_t n = piece.q_begin; n < piece.q_end; ++n) {
        first = first && !covered[static_cast<std::size_t>(n)];
        covered[static_cast<std::size_t>(n)] = true;
      }
      EXPECT_EQ(piece.first, first);
    };
    for (const Piece& piece : plan.gather_pieces(rank)) {
      take(piece, problem.rows);
      const auto found = pairs_of_piece(piece, rows[static_cast<std::size_t>(rank)], whole);
      EXPECT_EQ(static_cast<double>(found.size()), piece.pairs);
      gathered.insert(gathered.end(), found.begin(), found.end());
    }
    EXPECT_EQ(counted, pairs);
    covered.assign(covered.size(), false);
    std::vector<int64_t> buffer;
    for (const Run& run : plan.needed_keys(rank)) {
      EXPECT_TRUE(run.step == 1 && run.local == std::ssize(buffer) && (buffer.empty() || run.begin > buffer.back()));
      for (int64_t n = 0; n < run.count; ++n) buffer.push_back(run.begin + n);
    }
    for (const auto& [row, key] : mask) {
      if (std::ranges::find(rows[static_cast<std::size_t>(rank)], row) != rows[static_cast<std::size_t>(rank)].end())
        needed.insert(key);
    }
    EXPECT_TRUE(std::ranges::equal(buffer, needed));
    for (const Piece& piece : plan.needed_pieces(rank)) {
      take(piece, std::ssize(buffer));
      const auto found = pairs_of_piece(piece, rows[static_cast<std::size_t>(rank)], buffer);
      EXPECT_EQ(static_cast<double>(found.size()), piece.pairs);
      needing.insert(needing.end(), found.begin(), found.end());
    }
    covered.assign(covered.size(), false);
    const auto steps = plan.ring_pieces(rank);
    EXPECT_EQ(std::ssize(steps), plan.ring_hops() + 1);
    for (std::size_t step = 0; step < steps.size(); ++step) {
      const auto owner = static_cast<std::size_t>((rank - static_cast<int>(step) + problem.ranks) % problem.ranks);
      for (const Piece& piece : steps[step]) {
        take(piece, std::ssize(rows[owner]));
        const auto found = pairs_of_piece(piece, rows[static_cast<std::size_t>(rank)], rows[owner]);
        EXPECT_EQ(static_cast<double>(found.size()), piece.pairs);
        ringed.insert(ringed.end(), found.begin(), found.end());
        last_hop_needed = last_hop_needed || step + 1 == steps.size();
      }
    }
  }
  const std::vector<Pair> all(mask.begin(), mask.end());
  std::ranges::sort(gathered);
  std::ranges::sort(ringed);
  std::ranges::sort(needing);
  EXPECT_EQ(gathered, all);
  EXPECT_EQ(ringed, all);
  EXPECT_EQ(needing, all);
  EXPECT_TRUE(last_hop_needed);
}

// And of the plans in which ranks are grouped.
void expect_right_in_groups(const Plan& plan) {
  expect_right(plan);
  for (int size = 2; size <= plan.problem().ranks; ++size) {
    if (plan.problem().ranks % size != 0) continue;
    const Plan groups = plan.grouped(size);
    expect_right(groups);
    for (int group = 0; group < groups.problem().ranks; ++group) {
      std::vector<int64_t> rows = rows_of(groups, group), members;
      for (int rank = group * size; rank < (group + 1) * size; ++rank) {
        for (const int64_t row : rows_of(plan, rank)) members.push_back(row);
      }
      std::ranges::sort(rows);
      std::ranges::sort(members);
      EXPECT_EQ(rows, members);
    }
    // One rank has its rows in the whole's order: what it computes with needs no moving.
    if (size == plan.problem().ranks) {
      EXPECT_TRUE(std::ranges::is_sorted(groups.permutation()));
    }
  }
}

std::string told(const Problem& p) {
  std::string out = std::string(name_of(p.order)) + ", " + std::to_string(p.rows) + " rows, " +
                    std::to_string(p.ranks) + " ranks, causal " + std::to_string(static_cast<int>(p.causal)) +
                    ", window " + std::to_string(p.window_left) + " " + std::to_string(p.window_right) + ", cu_seqlens";
  for (const int64_t end : p.cu_seqlens) out += " " + std::to_string(end);
  return out;
}

TEST(DistributedPlan, HasEveryPairOfAnyDocumentsOnce) {
  std::mt19937 random(7);
  const auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int n = 0; n < 250; ++n) {
    Problem p{.rows = draw(0, n % 5 == 0 ? 6 : 70), .ranks = static_cast<int>(draw(1, 6))};
    p.order = kAll[n % 5];
    p.causal = n % 3 == 0 ? Causal::none : n % 3 == 1 ? Causal::top_left : Causal::bottom_right;
    if (draw(0, 2) == 0) p.window_left = draw(0, 20);
    if (draw(0, 2) == 0) p.window_right = draw(0, 9);
    if (draw(0, 2) > 0) {
      p.cu_seqlens = {0, p.rows};
      for (int64_t cut = draw(0, 6); cut > 0; --cut) p.cu_seqlens.push_back(draw(0, p.rows));
      std::ranges::sort(p.cu_seqlens);
    }
    SCOPED_TRACE(told(p));
    expect_right_in_groups(Plan(p));
    if (testing::Test::HasFailure()) return;
  }
}

TEST(DistributedPlan, HasEveryPairOfAnyAreasOnce) {
  std::mt19937 random(8);
  const auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int n = 0; n < 120; ++n) {
    Problem p{.rows = draw(1, 50), .ranks = static_cast<int>(draw(1, 4))};
    p.order = kAll[n % 5 == 3 ? 4 : n % 5];
    // Tiles of a grid, some of them left out: rows of several areas, and of none.
    const int64_t cut_q = draw(0, p.rows), cut_k = draw(0, p.rows);
    for (const auto& [q_begin, q_end] : {Pair{0, cut_q}, {cut_q, p.rows}}) {
      for (const auto& [key_begin, key_end] : {Pair{0, cut_k}, {cut_k, p.rows}}) {
        if (draw(0, 3) == 0) continue;
        Area area{q_begin, q_end, key_begin, key_end, static_cast<Causal>(draw(0, 2)), -1, -1};
        if (draw(0, 2) == 0) area.window_left = draw(0, 12);
        if (draw(0, 2) == 0) area.window_right = draw(0, 12);
        p.areas.push_back(area);
      }
    }
    if (p.areas.empty()) continue;
    SCOPED_TRACE(told(p) + ", case " + std::to_string(n));
    expect_right_in_groups(Plan(p));
    if (testing::Test::HasFailure()) return;
  }
}

TEST(DistributedPlan, ZigzagIsTwoRunsOfARankAndEven) {
  const Plan plan({.rows = 8192, .ranks = 4, .causal = Causal::top_left});
  ASSERT_EQ(plan.runs(1).size(), 2u);
  EXPECT_EQ(plan.runs(1)[0].begin, 1024);
  EXPECT_EQ(plan.runs(1)[1].begin, 6 * 1024);
  EXPECT_EQ(plan.runs(3).size(), 1u);  // its two parts are neighbours
  EXPECT_GT(plan.balance(), 0.999);
  EXPECT_EQ(plan.gather_pieces(0).size(), 2u);
  const Plan halves({.rows = 8192, .ranks = 2, .causal = Causal::top_left, .order = Order::contiguous});
  EXPECT_NEAR(halves.balance(), 2.0 / 3, 1e-3);  // the later rank has three quarters of the work
}

TEST(DistributedPlan, PackedDocumentsNeedFewCalls) {
  Problem p{.rows = 0, .ranks = 4, .cu_seqlens = {0}, .causal = Causal::top_left, .order = Order::per_document};
  for (int64_t n = 0; n < 500; ++n) p.cu_seqlens.push_back(p.cu_seqlens.back() + 1 + n * 37 % 90);
  p.rows = p.cu_seqlens.back();
  for (const Order order : {Order::zigzag, Order::striped, Order::per_document}) {
    p.order = order;
    const Plan plan(p);
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_LE(plan.gather_pieces(rank).size(), 2u) << name_of(order);
      for (const auto& pieces : plan.ring_pieces(rank)) EXPECT_LE(pieces.size(), 4u) << name_of(order);
    }
  }
  EXPECT_GT(Plan(p).balance(), 0.9);
}

TEST(DistributedPlan, TheSolverIsEvenInPairsAndRows) {
  // One long document and many short ones, which parts of as many rows serve badly.
  Problem p{.rows = 0, .ranks = 8, .cu_seqlens = {0, 20000}, .causal = Causal::top_left};
  for (int64_t n = 0; n < 300; ++n) p.cu_seqlens.push_back(p.cu_seqlens.back() + 20 + n * 53 % 400);
  p.rows = p.cu_seqlens.back();
  p.order = Order::contiguous;
  const double contiguous = Plan(p).balance();
  p.order = Order::balanced;
  const Plan plan(p);
  EXPECT_GT(plan.balance(), 0.995);
  EXPECT_LT(contiguous, 0.5);
  for (int rank = 0; rank < 8; ++rank) EXPECT_LE(plan.rows(rank), (p.rows + 7) / 8);
}

TEST(DistributedPlan, WindowsEndTheRingEarly) {
  Problem p{.rows = 8000, .ranks = 8, .causal = Causal::top_left, .window_left = 500, .order = Order::contiguous};
  EXPECT_EQ(Plan(p).ring_hops(), 1);
  p.window_left = 1001;
  EXPECT_EQ(Plan(p).ring_hops(), 2);
  p.window_left = -1;
  EXPECT_EQ(Plan(p).ring_hops(), 7);
  p.cu_seqlens = {0, 1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000};
  EXPECT_EQ(Plan(p).ring_hops(), 0);  // a document a rank
}

TEST(DistributedPlan, HeadsAreEvenAndCutWhereTheyMustBe) {
  const auto shares = [](int64_t heads, int64_t kv_heads, int ranks) { return head_shares(heads, kv_heads, ranks); };
  using Shares = std::vector<HeadShare>;
  EXPECT_EQ(shares(8, 2, 2), (Shares{{0, 4, 0, 1}, {4, 8, 1, 2}}));
  EXPECT_EQ(shares(8, 2, 4), (Shares{{0, 2, 0, 1}, {2, 4, 0, 1}, {4, 6, 1, 2}, {6, 8, 1, 2}}));
  EXPECT_EQ(shares(6, 2, 4), (Shares{{0, 2, 0, 1}, {2, 3, 0, 1}, {3, 5, 1, 2}, {5, 6, 1, 2}}));  // ends with a group
  EXPECT_EQ(shares(32, 8, 3), (Shares{{0, 11, 0, 3}, {11, 22, 2, 6}, {22, 32, 5, 8}}));
  EXPECT_EQ(shares(2, 1, 4), (Shares{{0, 1, 0, 1}, {1, 2, 0, 1}, {2, 2, 1, 1}, {2, 2, 1, 1}}));
  for (int64_t kv_heads = 1; kv_heads <= 6; ++kv_heads) {
    for (int64_t group = 1; group <= 5; ++group) {
      for (int ranks = 1; ranks <= 9; ++ranks) {
        int64_t begin = 0;
        for (const HeadShare& share : shares(kv_heads * group, kv_heads, ranks)) {
          EXPECT_EQ(share.begin, begin);
          begin = share.end;
          EXPECT_LE(share.end - share.begin, (kv_heads * group + ranks - 1) / ranks);
          if (share.begin == share.end) continue;
          EXPECT_EQ(share.kv_begin, share.begin / group);
          EXPECT_EQ(share.kv_end, (share.end - 1) / group + 1);
        }
        EXPECT_EQ(begin, kv_heads * group);
      }
    }
  }
}

TEST(DistributedPlan, GroupsOfTwoDimensionsAreOfKvHeads) {
  const auto size = [](int ranks, int64_t kv_heads, int ulysses = 0) {
    const Plan plan({.rows = 64, .ranks = ranks, .heads = kv_heads, .kv_heads = kv_heads, .ulysses = ulysses});
    return plan.ulysses(Scheme::two_dimensional);
  };
  EXPECT_EQ(size(16, 8), 8);
  EXPECT_EQ(size(16, 5), 4);
  EXPECT_EQ(size(8, 8), 4);
  EXPECT_EQ(size(9, 1), 3);
  EXPECT_EQ(size(7, 8), 7);  // a prime: all of them
  EXPECT_EQ(size(8, 8, 2), 2);
}

TEST(DistributedPlan, PositionsAreThoseInTheDocument) {
  const Plan plan({.rows = 10, .ranks = 2, .cu_seqlens = {0, 3, 3, 10}, .order = Order::striped});
  EXPECT_EQ(plan.positions(0), (std::vector<std::int32_t>{0, 2, 1, 3, 5}));
  EXPECT_EQ(plan.positions(1), (std::vector<std::int32_t>{1, 0, 2, 4, 6}));
}

TEST(DistributedPlan, TheDigestTellsPlansApart) {
  const Problem p{.rows = 100, .ranks = 3, .causal = Causal::top_left};
  std::set<std::uint64_t> found = {Plan(p).digest()};
  EXPECT_EQ(Plan(p).digest(), *found.begin());
  const auto changed = [&](const auto& change) {
    Problem other = p;
    change(other);
    EXPECT_TRUE(found.insert(Plan(other).digest()).second);
  };
  changed([](Problem& o) { o.rows = 101; });
  changed([](Problem& o) { o.ranks = 2; });
  changed([](Problem& o) { o.causal = Causal::none; });
  changed([](Problem& o) { o.window_left = 9; });
  changed([](Problem& o) { o.order = Order::contiguous; });
  changed([](Problem& o) { o.cu_seqlens = {0, 40, 100}; });
}

TEST(DistributedPlan, RefusesInSentences) {
  const auto refusal = [](const Problem& p) {
    try {
      Plan{p};
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  const std::string at = "[distributed.plan] ";
  EXPECT_EQ(refusal({.rows = -1}), at + "rows is -1: it must be from 0 to 2^31 - 1");
  EXPECT_EQ(refusal({.rows = 4, .ranks = 0}), at + "ranks is 0: it must be from 1 to 4096");
  EXPECT_EQ(refusal({.rows = 4, .heads = 6, .kv_heads = 4}),
            at + "heads is 6 and kv_heads 4: heads must be a multiple of kv_heads");
  EXPECT_EQ(refusal({.rows = 4, .head_size_v = 0}), at + "head_size_v is 0: it must be at least 1");
  EXPECT_EQ(refusal({.rows = 4, .dtype = DType::i32}), at + "dtype is int32: it must be float32, float16 or bfloat16");
  EXPECT_EQ(refusal({.rows = 4, .cu_seqlens = {0, 3}}),
            at + "cu_seqlens goes from 0 to 3: it must go from 0 to rows, 4");
  EXPECT_EQ(refusal({.rows = 4, .cu_seqlens = {0, 3, 2, 4}}),
            at + "cu_seqlens[2] is 2 after 3: it must never decrease");
  EXPECT_EQ(refusal({.rows = 4, .window_left = -2}), at + "window is (-2, -1): each side must be 0 or more, or -1");
  EXPECT_EQ(refusal({.rows = 4, .areas = {{0, 5, 0, 4}}}),
            at + "areas[0] has rows [0, 5) and keys [0, 4): they must lie in [0, 4)");
  EXPECT_EQ(refusal({.rows = 4, .areas = {{0, 4, 0, 3}, {2, 3, 2, 4}}}),
            at + "areas[0] and areas[1] share pairs: areas of the same rows must have other keys");
  EXPECT_EQ(refusal({.rows = 4, .causal = Causal::top_left, .areas = {{0, 4, 0, 4}}}),
            at + "areas are given beside causal or window: each area has its own");
  EXPECT_EQ(refusal({.rows = 4, .cu_seqlens = {0, 4}, .areas = {{0, 4, 0, 4}}}),
            at + "areas and cu_seqlens are given: documents are areas of their own");
  EXPECT_EQ(refusal({.rows = 4, .areas = {{0, 4, 0, 4}}, .order = Order::per_document}),
            at + "order is per_document and areas are given: it is for documents");
  EXPECT_EQ(refusal({.rows = 4, .ranks = 6, .ulysses = 4}), at + "ulysses is 4: it must divide the ranks, 6, or be 0");
  EXPECT_EQ(refusal({.rows = 4, .costs = {.link_bandwidth = 0}}), at + "link_bandwidth is 0: it must be above 0");
  EXPECT_EQ(refusal({.rows = 4, .costs = {.network_bandwidth = -1}}),
            at + "network_bandwidth is -1: it must be above 0");
  EXPECT_EQ(refusal({.rows = 4, .costs = {.ranks_per_host = -2}}),
            at + "ranks_per_host is -2: it must not be negative");
}

}  // namespace
}  // namespace heddle::distributed
