#include "distributed/key_rows.h"

#include <utility>

#include "distributed/cuts.h"
#include "distributed/pieces.h"

namespace heddle::distributed {
namespace {

bool same_host(const Problem& p, int a, int b) {
  return p.costs.ranks_per_host == 0 || a / p.costs.ranks_per_host == b / p.costs.ranks_per_host;
}

// Rows that one rank sends another, and how many messages they are: runs that lie one behind the other on both, each
// either of the receiver's first piece or not.
class Sent {
 public:
  // A run as the sender has it, from row `at` of the receiver's buffer on.
  void add(const Run& run, std::int64_t at, const FirstPiece& piece) {
    const std::int64_t begin = std::clamp<std::int64_t>(ceil_div(piece.key_begin - at, run.step), 0, run.count);
    const std::int64_t end = std::clamp<std::int64_t>(ceil_div(piece.key_end - at, run.step), begin, run.count);
    add(run, at, 0, begin, false), add(run, at, begin, end, true), add(run, at, end, run.count, false);
  }
  // All of a rank's rows, if they are in more messages than go each by itself.
  void add_joined(std::int64_t rows, bool first) {
    (first ? first_ : rest_) += rows;
    messages_ += kMostMessages + 1;
  }
  static constexpr std::int64_t kMostMessages = 8;  // _MOST_RUNS of python/heddle/distributed/pieces.py

  bool in_place() const { return messages_ <= kMostMessages; }
  double all() const { return number(first_ + rest_); }
  // What is not in place is one message.
  double first() const { return number(in_place() || first_ == 0 ? first_ : first_ + rest_); }

 private:
  void add(const Run& run, std::int64_t at, std::int64_t begin, std::int64_t end, bool first) {
    if (begin >= end) return;
    const bool goes_on = run.step == 1 && run.local + begin == local_ && at + begin == at_ && first == was_first_;
    if (!goes_on) messages_ += run.step == 1 ? 1 : end - begin;
    (first ? first_ : rest_) += end - begin;
    local_ = run.local + end, at_ = at + end, was_first_ = first;
  }

  std::int64_t first_ = 0, rest_ = 0, messages_ = 0, local_ = -1, at_ = -1;  // the last two: where the last run ends
  bool was_first_ = false;
};

// A rank's runs in the order of the whole, those joined that are one behind the other there, too. Their wave is the
// rank.
std::vector<Run> joined_runs(const Plan& plan, int rank) {
  std::vector<Run> runs = plan.runs(rank), out;
  std::ranges::sort(runs, {}, &Run::begin);
  for (Run& run : runs) {
    run.wave = rank;
    const bool goes_on = !out.empty() && run.step == 1 && out.back().step == 1 &&
                         run.begin == out.back().begin + out.back().count &&
                         run.local == out.back().local + out.back().count;
    if (goes_on) {
      out.back().count += run.count;
    } else {
      out.push_back(run);
    }
  }
  return out;
}

// All of a rank's rows to where they are in the whole.
Sent sent_to_whole(const std::vector<Run>& runs, std::int64_t rows, const FirstPiece& piece) {
  Sent out;
  if (std::ssize(runs) > Sent::kMostMessages || (!runs.empty() && runs.front().step > 1)) {
    out.add_joined(rows, !inside(runs, piece.key_begin, piece.key_end).empty());
  } else {
    for (const Run& run : runs) out.add(run, run.begin, piece);
  }
  return out;
}

}  // namespace

void add(Traffic& traffic, const Problem& p, int a, int b, double amount) {
  (same_host(p, a, b) ? traffic.inside : traffic.across) += amount;
}

std::vector<FirstPiece> first_pieces(const Plan& plan, Scheme scheme) {
  std::vector<FirstPiece> out;
  for (int rank = 0; rank < plan.problem().ranks; ++rank) {
    const auto pieces = scheme == Scheme::needed ? plan.needed_pieces(rank) : plan.gather_pieces(rank);
    FirstPiece& first = out.emplace_back();
    first.whole = cover_once(pieces, plan.rows(rank));
    if (pieces.empty()) continue;
    first.key_begin = pieces.front().key_begin, first.key_end = pieces.front().key_end;
    first.pairs = pieces.front().pairs;
  }
  return out;
}

std::vector<KeyRows> key_rows(const Plan& plan, Scheme scheme, std::span<const FirstPiece> pieces) {
  const Problem& p = plan.problem();
  const int ranks = p.ranks;
  std::vector<KeyRows> out(static_cast<std::size_t>(ranks));
  if (scheme == Scheme::ring) {
    // A rank keeps its own share; the others' goes on from the next rank to the last one, and home.
    for (int rank = 0; rank < ranks; ++rank) {
      KeyRows& rows = out[static_cast<std::size_t>(rank)];
      const int next = (rank + 1) % ranks;
      const auto held = [&](int step) { return number(plan.rows((rank - step + ranks) % ranks)); };
      for (int step = 1; step <= plan.ring_hops(); ++step) {
        add(rows.keys, p, rank, next, held(step - 1));
        // Home from the last one.
        add(rows.gradients, p, rank, step == plan.ring_hops() ? (rank - step + ranks) % ranks : next, held(step));
      }
    }
    return out;
  }
  std::vector<std::vector<Run>> of_ranks;
  std::vector<Run> all;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::vector<Run>& runs = of_ranks.emplace_back(joined_runs(plan, rank));
    all.insert(all.end(), runs.begin(), runs.end());
  }
  std::ranges::sort(all, {}, &Run::begin);
  const auto send = [&](int from, int to, const Sent& rows) {
    KeyRows &sender = out[static_cast<std::size_t>(from)], &receiver = out[static_cast<std::size_t>(to)];
    double Traffic::*const way = same_host(p, from, to) ? &Traffic::inside : &Traffic::across;
    sender.keys.*way += rows.all(), receiver.keys_got.*way += rows.all();
    sender.first.*way += rows.first(), receiver.first_got.*way += rows.first();
    // Gradients come back.
    sender.gradients_got.*way += rows.all(), receiver.gradients.*way += rows.all();
    receiver.in_place = receiver.in_place && rows.in_place();
  };
  std::vector<Sent> sent(static_cast<std::size_t>(ranks));
  std::vector<int> senders;
  for (int to = 0; to < ranks; ++to) {
    const FirstPiece piece = pieces.empty() ? FirstPiece{} : pieces[static_cast<std::size_t>(to)];
    if (scheme == Scheme::gather) {
      for (int from = 0; from < ranks; ++from) {
        if (from != to) send(from, to, sent_to_whole(of_ranks[static_cast<std::size_t>(from)], plan.rows(from), piece));
      }
      continue;
    }
    for (const Run& keys : plan.needed_keys(to)) {
      for (const Run& run : inside(all, keys.begin, keys.begin + keys.count)) {
        if (run.wave == to) continue;
        Sent& rows = sent[static_cast<std::size_t>(run.wave)];
        if (rows.all() == 0) senders.push_back(run.wave);
        rows.add(run, keys.local + run.begin - keys.begin, piece);
      }
    }
    for (const int from : senders) send(from, to, std::exchange(sent[static_cast<std::size_t>(from)], {}));
    senders.clear();
  }
  return out;
}

}  // namespace heddle::distributed
