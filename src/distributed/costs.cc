// What schemes send, and the times that are predicted from it.
#include <algorithm>

#include "core/check.h"
#include "distributed/arguments.h"
#include "distributed/bands.h"
#include "distributed/key_rows.h"

namespace heddle::distributed {
namespace {

constexpr double kBytesOfF32 = 4;
// Of those that take equally long the first: `needed` sends no more than `gather`.
constexpr Scheme kKeySchemes[] = {Scheme::needed, Scheme::gather, Scheme::ring};
constexpr Scheme kSchemes[] = {Scheme::needed, Scheme::gather, Scheme::ring, Scheme::ulysses, Scheme::two_dimensional};

double seconds_of(const Plan& plan, const Traffic& bytes) {
  const Costs& costs = plan.problem().costs;
  if (bytes.all() == 0) return 0;
  return costs.link_latency + std::max(bytes.inside / costs.link_bandwidth, bytes.across / costs.network_bandwidth);
}

// What a row of keys and values weighs, and seconds of products.
struct Weights {
  double keys, gradients, forward, backward;
  double summed_row, merged_row;  // of a row whose results are merged, once and for each result after the first

  explicit Weights(const Problem& p) {
    const double kv = number(p.batch * p.kv_heads) * number(p.head_size + p.head_size_v);
    keys = kv * static_cast<double>(size_of(p.dtype));
    gradients = kv * kBytesOfF32;
    const double pair = number(p.batch * p.heads) * 2;
    forward = pair * number(p.head_size + p.head_size_v) / p.costs.forward_flops;
    backward = pair * number(3 * p.head_size + 2 * p.head_size_v) / p.costs.backward_flops;
    // The sum is begun in float32, read again, and rounded; a result is written, and two are read and one written.
    const double row = number(p.batch * p.heads * p.head_size_v) * kBytesOfF32 / p.costs.memory_bandwidth;
    summed_row = 3 * row, merged_row = 4 * row;
  }
};

struct Seconds {
  double forward = 0, backward = 0;
  double both() const { return forward + backward; }
};

// And whether keys come in two exchanges.
struct AtOnce {
  Seconds seconds;
  bool split = false;
};

// Keys, then products; the backward's gradients after them. Or first what receivers' first pieces have, and the rest
// while these are computed, where both passes together are faster by it: ranks of many have a small first piece, and
// those that have none of the others' keys in it wait for two exchanges.
AtOnce at_once(const Plan& plan, Scheme scheme) {
  const Problem& p = plan.problem();
  const Weights w(p);
  const bool may_split = p.costs.split_keys && p.batch == 1;  // sequences of a batch are put in their places
  const auto pieces = may_split ? first_pieces(plan, scheme) : std::vector<FirstPiece>();
  const std::vector<KeyRows> rows = key_rows(plan, scheme, pieces);
  Traffic moved, first, rest;
  double pairs = 0;
  for (const KeyRows& of_rank : rows) {
    moved.take_most(of_rank.keys), moved.take_most(of_rank.keys_got);
    first.take_most(of_rank.first), first.take_most(of_rank.first_got);
    rest.take_most(of_rank.keys - of_rank.first), rest.take_most(of_rank.keys_got - of_rank.first_got);
  }
  for (int rank = 0; rank < p.ranks; ++rank) pairs = std::max(pairs, plan.pairs(rank));
  const double keys = seconds_of(plan, moved * w.keys), gradients = seconds_of(plan, moved * w.gradients);
  const AtOnce together{{keys + pairs * w.forward, keys + pairs * w.backward + gradients}};
  if (!may_split || rest.all() == 0) return together;

  const double early = seconds_of(plan, first * w.keys), late = seconds_of(plan, rest * w.keys);
  AtOnce split{.seconds = {}, .split = true};
  for (int rank = 0; rank < p.ranks; ++rank) {
    const FirstPiece& piece = pieces[static_cast<std::size_t>(rank)];
    const bool in_place = rows[static_cast<std::size_t>(rank)].in_place;
    const auto with_keys = [&](double of_pair, bool beside) {
      const double hidden = beside ? std::min(piece.pairs * of_pair, late) : 0;
      return early + late + plan.pairs(rank) * of_pair - hidden;
    };
    // Where rows are in several pieces, the forward merges them when all keys are there.
    split.seconds.forward = std::max(split.seconds.forward, with_keys(w.forward, in_place && piece.whole));
    split.seconds.backward = std::max(split.seconds.backward, with_keys(w.backward, in_place) + gradients);
  }
  return split.seconds.both() < together.seconds.both() ? split : together;
}

Seconds seconds_of_ring(const Plan& plan) {
  const Weights w(plan.problem());
  const int ranks = plan.problem().ranks, hops = plan.ring_hops();
  std::int64_t rows = 0;
  // Of each step the most that any rank has to do. Gradients of keys go on while the next step is computed.
  std::vector<double> pairs(static_cast<std::size_t>(hops) + 1), merged(pairs.size());
  std::vector<Traffic> sent(pairs.size()), home(pairs.size());
  for (int rank = 0; rank < ranks; ++rank) {
    const auto steps = plan.ring_pieces(rank);
    rows = std::max(rows, plan.rows(rank));
    for (std::size_t t = 0; t < steps.size(); ++t) {
      double of_step = 0, rows_merged = 0;
      for (const Piece& piece : steps[t]) {
        of_step += piece.pairs;
        if (!piece.first) rows_merged += number(piece.q_end - piece.q_begin);
      }
      pairs[t] = std::max(pairs[t], of_step);
      merged[t] = std::max(merged[t], rows_merged);
      const int owner = (rank - static_cast<int>(t) + ranks) % ranks;
      Traffic on, back;
      add(on, plan.problem(), rank, (rank + 1) % ranks, number(plan.rows(owner)));
      add(back, plan.problem(), rank, owner, number(plan.rows(owner)));
      sent[t].take_most(on), home[t].take_most(back);
    }
  }
  Seconds out{.forward = number(rows) * w.summed_row, .backward = number(rows) * w.summed_row};
  for (std::size_t t = 0; t < pairs.size(); ++t) {
    const bool last = t + 1 == pairs.size();
    const double keys = last ? 0 : seconds_of(plan, sent[t] * w.keys);
    const double gradients = t > 1 ? seconds_of(plan, sent[t - 1] * w.gradients) : 0;
    out.forward += std::max(pairs[t] * w.forward + merged[t] * w.merged_row, keys);
    out.backward += std::max(pairs[t] * w.backward, keys + gradients);
    if (last && hops > 0) out.backward += seconds_of(plan, home[t] * w.gradients);
    // A share is begun, read by who adds to it, and joined with what came.
    out.backward += 4 * sent[t].all() * w.gradients / plan.problem().costs.memory_bandwidth;
  }
  return out;
}

Seconds seconds_of_keys(const Plan& plan, Scheme scheme) {
  return scheme == Scheme::ring ? seconds_of_ring(plan) : at_once(plan, scheme).seconds;
}

// The first of those that take the least time. Each is predicted once: a ring of many ranks takes long.
template <class Predict>
Scheme fastest(std::span<const Scheme> schemes, const Predict& predict) {
  std::vector<double> seconds;
  for (const Scheme scheme : schemes) seconds.push_back(predict(scheme).both());
  return schemes[static_cast<std::size_t>(std::ranges::min_element(seconds) - seconds.begin())];
}

Scheme best_of_keys(const Plan& plan) {
  return fastest(kKeySchemes, [&](Scheme scheme) { return seconds_of_keys(plan, scheme); });
}

// Of a row, the bytes of what goes to a rank with these heads, and of what comes back from it.
struct HeadBytes {
  double forward_there = 0, forward_back = 0, backward_there = 0, backward_back = 0;

  HeadBytes() = default;
  HeadBytes(const Problem& p, const HeadShare& share) {
    const double batch = number(p.batch), element = static_cast<double>(size_of(p.dtype));
    const double q = batch * number((share.end - share.begin) * p.head_size);
    const double o = batch * number((share.end - share.begin) * p.head_size_v);
    const double lse = batch * number(share.end - share.begin) * kBytesOfF32;
    const double kv = batch * number((share.kv_end - share.kv_begin) * (p.head_size + p.head_size_v));
    forward_there = (q + kv) * element;
    forward_back = o * element + lse;
    backward_there = (q + kv + 2 * o) * element + 2 * lse;
    backward_back = q * element + kv * kBytesOfF32;
  }
};
constexpr double HeadBytes::*kMoves[] = {&HeadBytes::forward_there, &HeadBytes::forward_back,
                                         &HeadBytes::backward_there, &HeadBytes::backward_back};

// Bytes that each rank sends, and gets, in the moves of heads for rows inside of its group.
class HeadMoves {
 public:
  HeadMoves(const Plan& plan, int size) : plan_(plan), size_(size) {
    const Problem& p = plan.problem();
    for (const HeadShare& share : head_shares(p.heads, p.kv_heads, size)) of_share_.emplace_back(p, share);
  }
  // move: of kMoves. There: own rows to the others' heads; back: others' rows from own heads.
  Traffic sent(std::size_t move, int rank) const {
    return move % 2 == 0 ? own_rows(move, rank) : own_heads(move, rank);
  }
  Traffic got(std::size_t move, int rank) const { return move % 2 == 0 ? own_heads(move, rank) : own_rows(move, rank); }
  double seconds(std::size_t move) const {
    Traffic most;
    for (int rank = 0; rank < plan_.problem().ranks; ++rank) {
      most.take_most(sent(move, rank)), most.take_most(got(move, rank));
    }
    return size_ > 1 ? seconds_of(plan_, most) : 0;
  }

 private:
  Traffic own_rows(std::size_t move, int rank) const {
    Traffic out;
    for (int n = 0; n < size_; ++n) {
      const double others = of_share_[static_cast<std::size_t>(n)].*kMoves[move];
      if (n != rank % size_) add(out, plan_.problem(), rank, peer(rank, n), number(plan_.rows(rank)) * others);
    }
    return out;
  }
  Traffic own_heads(std::size_t move, int rank) const {
    Traffic out;
    const double own = of_share_[static_cast<std::size_t>(rank % size_)].*kMoves[move];
    for (int n = 0; n < size_; ++n) {
      if (n != rank % size_) add(out, plan_.problem(), rank, peer(rank, n), number(plan_.rows(peer(rank, n))) * own);
    }
    return out;
  }
  int peer(int rank, int n) const { return rank - rank % size_ + n; }

  const Plan& plan_;
  const int size_;
  std::vector<HeadBytes> of_share_;
};

// Of every rank.
std::vector<Plan::Bytes> bytes_of_ranks(const Plan& plan, Scheme scheme) {
  const Problem& p = plan.problem();
  std::vector<Plan::Bytes> out;
  if (!heads_move(scheme)) {
    const Weights w(p);
    for (const KeyRows& rows : key_rows(plan, scheme)) {
      const double keys = rows.keys.all() * w.keys;
      out.push_back({keys, keys + rows.gradients.all() * w.gradients});
    }
    return out;
  }
  const int size = plan.ulysses(scheme);
  const Plan groups = plan.grouped(size);
  const std::vector<KeyRows> across = key_rows(groups, best_of_keys(groups));
  const std::vector<HeadShare> shares = head_shares(p.heads, p.kv_heads, size);
  const HeadMoves moves(plan, size);
  for (int rank = 0; rank < p.ranks; ++rank) {
    Problem of_share = p;
    const HeadShare& share = shares[static_cast<std::size_t>(rank % size)];
    of_share.kv_heads = share.kv_end - share.kv_begin;
    const Weights w(of_share);
    const KeyRows& rows = across[static_cast<std::size_t>(rank / size)];
    const double keys = rows.keys.all() * w.keys;
    out.push_back({keys + (moves.sent(0, rank) + moves.sent(1, rank)).all(),
                   keys + rows.gradients.all() * w.gradients + (moves.sent(2, rank) + moves.sent(3, rank)).all()});
  }
  return out;
}

Seconds seconds_of_scheme(const Plan& plan, Scheme scheme) {
  if (!heads_move(scheme)) return seconds_of_keys(plan, scheme);
  const int size = plan.ulysses(scheme);
  const Plan groups = plan.grouped(size);
  const Seconds across = seconds_of_keys(groups, best_of_keys(groups));
  const HeadMoves moves(plan, size);
  return {moves.seconds(0) + across.forward + moves.seconds(1), moves.seconds(2) + across.backward + moves.seconds(3)};
}

void check_scheme(Scheme scheme) {
  Check("distributed.plan").require(scheme != Scheme::automatic, "scheme is auto: it must be one that is named");
}

}  // namespace

std::vector<HeadShare> head_shares(std::int64_t heads, std::int64_t kv_heads, int ranks) {
  const std::int64_t group = heads / kv_heads, most = ceil_div(heads, ranks);
  std::vector<HeadShare> out;
  std::int64_t begin = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    std::int64_t end = std::min(begin + most, heads);
    const std::int64_t whole_groups = end / group * group;
    if (whole_groups > begin && heads - whole_groups <= most * (ranks - 1 - rank)) end = whole_groups;
    out.push_back({begin, end, begin / group, ceil_div(end, group)});
    begin = end;
  }
  return out;
}

Scheme Plan::across() const { return best_of_keys(grouped(ulysses(Scheme::two_dimensional))); }

Plan::Bytes Plan::bytes(Scheme scheme, int rank) const {
  check_scheme(scheme);
  return bytes_of_ranks(*this, scheme)[static_cast<std::size_t>(rank)];
}

SchemeCost Plan::cost(Scheme scheme) const {
  check_scheme(scheme);
  const Seconds seconds = seconds_of_scheme(*this, scheme);
  SchemeCost out{.forward_seconds = seconds.forward, .backward_seconds = seconds.backward};
  for (const Bytes& sent : bytes_of_ranks(*this, scheme)) {
    out.forward_bytes = std::max(out.forward_bytes, sent.forward);
    out.backward_bytes = std::max(out.backward_bytes, sent.backward);
  }
  return out;
}

bool Plan::splits_keys(Scheme scheme) const {
  return (scheme == Scheme::gather || scheme == Scheme::needed) && at_once(*this, scheme).split;
}

Scheme Plan::chosen() const {
  // 2d of groups of one rank, or of all, is one of the others.
  const int size = ulysses(Scheme::two_dimensional);
  const bool two = 1 < size && size < problem_.ranks;
  return fastest(std::span(kSchemes).first(two ? 5 : 4),
                 [&](Scheme scheme) { return seconds_of_scheme(*this, scheme); });
}

}  // namespace heddle::distributed
