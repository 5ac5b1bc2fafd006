// A rank's share: keys gathered or passed round, its pieces run, gradients of keys brought home.
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "distributed/arguments.h"
#include "distributed/calls.h"
#include "heddle/partial.h"

namespace heddle::distributed {
namespace {

std::span<std::byte> bytes_at(const Workspace& memory, std::size_t bytes) {
  return {static_cast<std::byte*>(memory.data), bytes};
}
std::span<float> floats_at(const Workspace& memory, std::int64_t count) {
  return {static_cast<float*>(memory.data), static_cast<std::size_t>(count)};
}

// Memory of float32, kept from call to call.
class Floats {
 public:
  std::span<float> get(std::int64_t count) {
    return floats_at(memory_.get(static_cast<std::size_t>(count) * sizeof(float)), count);
  }
  std::span<float> filled(std::int64_t count, float value) {
    const std::span<float> out = get(count);
    std::ranges::fill(out, value);
    return out;
  }

 private:
  WorkspaceBuffer memory_;
};

}  // namespace

struct RankAttention::State {
  State(const Plan& plan, Communicator& communicator, Scheme scheme)
      : plan(plan),
        communicator(communicator),
        scheme(scheme == Scheme::automatic ? plan.chosen() : scheme),
        rank(communicator.rank()),
        ranks(communicator.size()),
        agreement(communicator) {
    if (this->scheme == Scheme::ring) {
      steps = plan.ring_pieces(rank);
    } else {
      steps = {plan.gather_pieces(rank)};
    }
    std::int64_t covered = 0;
    for (const std::vector<Piece>& pieces : steps) {
      for (const Piece& piece : pieces) {
        whole = whole && piece.first;
        covered += piece.q_end - piece.q_begin;
      }
    }
    whole = whole && covered == plan.rows(rank) && this->scheme == Scheme::gather;
  }

  int rank_before(int n) const { return (rank - n % ranks + ranks) % ranks; }
  std::string round(const char* what, int step) const {
    return std::string(what) + ", step " + std::to_string(step) + " of " + std::to_string(plan.ring_hops());
  }

  void put_keys(const Call& call, void* data) const;
  // All keys in the whole's order.
  void gather_keys(const Call& call, TensorView& k, TensorView& v);
  // Calls use(step, k, v) while the next step's keys are on their way.
  template <class Use>
  void pass_keys_round(const Call& call, const Use& use);

  // Partial results of the rank's rows: o f32, 0 and lse -inf where there is none yet.
  void accumulate(Calls& calls, const std::vector<Piece>& pieces, const Call& call, const Rows& sum,
                  const TensorView& k, const TensorView& v);
  Rows new_sum(const Call& call);
  void finish(const Call& call, const Rows& sum);

  void gather_key_gradients(const Call& call, const Gradients& gradients, std::span<float> all);
  void give_key_gradients(const Call& call, const Gradients& gradients, std::span<float> own) const;

  const Plan& plan;
  Communicator& communicator;
  const Scheme scheme;
  const int rank, ranks;
  std::vector<std::vector<Piece>> steps;  // of `gather` one
  bool whole = true;                      // each row is in one piece: nothing is merged
  Agreement agreement;
  WorkspaceBuffer workspace, sent_keys, came_keys, ordered_keys;
  Floats sum_o, sum_lse, part_o, part_lse, row_gradients, key_gradients, next_gradients, came_gradients, parts;
};

void RankAttention::State::put_keys(const Call& call, void* data) const {
  const std::int64_t rows = plan.rows(rank);
  copy_rows({call.k}, {call.keys.k(data, rows)}, rows);
  copy_rows({call.v}, {call.keys.v(data, rows)}, rows);
}

void RankAttention::State::gather_keys(const Call& call, TensorView& k, TensorView& v) {
  const KeyBlock& keys = call.keys;
  const std::size_t own_bytes = keys.bytes(plan.rows(rank)), all_bytes = keys.bytes(plan.problem().rows);
  void* const own = sent_keys.get(own_bytes).data;
  put_keys(call, own);
  std::byte* const came = static_cast<std::byte*>(came_keys.get(all_bytes).data);
  std::vector<std::span<std::byte>> parts_of_ranks;
  std::size_t at = 0;
  for (int r = 0; r < ranks; ++r) {
    parts_of_ranks.emplace_back(came + at, keys.bytes(plan.rows(r)));
    at += parts_of_ranks.back().size();
  }
  communicator.all_gather({static_cast<const std::byte*>(own), own_bytes}, parts_of_ranks, "keys gathered");
  void* const ordered = ordered_keys.get(all_bytes).data;
  k = keys.k(ordered, plan.problem().rows);
  v = keys.v(ordered, plan.problem().rows);
  for (int r = 0; r < ranks; ++r) {
    void* const part_of_rank = parts_of_ranks[static_cast<std::size_t>(r)].data();
    for (const Run& run : plan.runs(r)) {
      copy_rows({keys.k(part_of_rank, plan.rows(r)), run.local}, {k, run.begin, run.step}, run.count);
      copy_rows({keys.v(part_of_rank, plan.rows(r)), run.local}, {v, run.begin, run.step}, run.count);
    }
  }
}

template <class Use>
void RankAttention::State::pass_keys_round(const Call& call, const Use& use) {
  std::int64_t most = 0;
  for (int r = 0; r < ranks; ++r) most = std::max(most, plan.rows(r));
  const std::size_t bytes = call.keys.bytes(most);
  Workspace here = sent_keys.get(bytes), next = came_keys.get(bytes);
  put_keys(call, here.data);
  for (int step = 0; step <= plan.ring_hops(); ++step) {
    const std::int64_t rows = plan.rows(rank_before(step)), rows_next = plan.rows(rank_before(step + 1));
    std::unique_ptr<Transfer> transfer;
    if (step < plan.ring_hops()) {
      transfer = communicator.exchange(bytes_at(here, call.keys.bytes(rows)), rank_before(ranks - 1),
                                       bytes_at(next, call.keys.bytes(rows_next)), rank_before(1),
                                       round("keys passed on", step + 1));
    }
    use(step, call.keys.k(here.data, rows), call.keys.v(here.data, rows));
    if (transfer) transfer->wait();
    std::swap(here, next);
  }
}

Rows RankAttention::State::new_sum(const Call& call) {
  const std::int64_t rows = plan.rows(rank), B = call.batch(), H = call.heads(), Dv = call.keys.head_size_v;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  return {call.q,
          {sum_o.filled(B * rows * H * Dv, 0).data(), DType::f32, {B, rows, H, Dv}},
          {sum_lse.filled(B * H * rows, kNone).data(), DType::f32, {B, H, rows}}};
}

void RankAttention::State::accumulate(Calls& calls, const std::vector<Piece>& pieces, const Call& call, const Rows& sum,
                                      const TensorView& k, const TensorView& v) {
  const std::int64_t B = call.batch(), H = call.heads(), Dv = call.keys.head_size_v;
  for (const Piece& piece : pieces) {
    if (piece.first) {
      calls.forward(piece, sum, k, v, false);
      continue;
    }
    // As large as all rows, of which the piece's are written.
    const std::int64_t rows = plan.rows(rank);
    const Rows one{call.q,
                   {part_o.get(B * rows * H * Dv).data(), DType::f32, {B, rows, H, Dv}},
                   {part_lse.get(B * H * rows).data(), DType::f32, {B, H, rows}}};
    calls.forward(piece, one, k, v, false);
    const auto of_piece = [&](const Rows& x) {
      return Partial{part(x.o, 1, piece.q_begin, piece.q_end), part(x.lse, 2, piece.q_begin, piece.q_end)};
    };
    const Partial partials[] = {of_piece(sum), of_piece(one)};
    merge_attention(partials, partials[0].o, partials[0].lse, {}, call.runtime);
  }
}

// The sink enters here, once.
void RankAttention::State::finish(const Call& call, const Rows& sum) {
  if (call.options.sink.given()) {
    const Partial all[] = {{sum.o, sum.lse}};
    merge_attention(all, sum.o, sum.lse, {.sink = call.options.sink}, call.runtime);
  }
  copy_rows({sum.o}, {call.o}, plan.rows(rank));
  if (!call.lse.given()) return;
  const auto* from = static_cast<const float*>(sum.lse.data);
  auto* const to = static_cast<float*>(call.lse.data);
  for (std::int64_t b = 0; b < call.lse.shape[0]; ++b) {
    for (std::int64_t head = 0; head < call.lse.shape[1]; ++head) {
      for (std::int64_t row = 0; row < call.lse.shape[2]; ++row) {
        to[b * call.lse.stride[0] + head * call.lse.stride[1] + row * call.lse.stride[2]] = *from++;
      }
    }
  }
}

void RankAttention::State::give_key_gradients(const Call& call, const Gradients& gradients,
                                              std::span<float> own) const {
  const std::int64_t rows = plan.rows(rank);
  if (gradients.dk.given()) copy_rows({call.gradients().k(own.data(), rows)}, {gradients.dk}, rows);
  if (gradients.dv.given()) copy_rows({call.gradients().v(own.data(), rows)}, {gradients.dv}, rows);
}

// all: what this rank adds to the gradients of all keys, in the whole's order.
void RankAttention::State::gather_key_gradients(const Call& call, const Gradients& gradients, std::span<float> all) {
  const KeyBlock block = call.gradients();
  const TensorView all_dk = block.k(all.data(), plan.problem().rows), all_dv = block.v(all.data(), plan.problem().rows);
  float* at = parts.get(block.elements(plan.problem().rows)).data();
  std::vector<std::span<const float>> shares;
  for (int r = 0; r < ranks; ++r) {
    const std::int64_t rows = plan.rows(r);
    for (const Run& run : plan.runs(r)) {
      copy_rows({all_dk, run.begin, run.step}, {block.k(at, rows), run.local}, run.count);
      copy_rows({all_dv, run.begin, run.step}, {block.v(at, rows), run.local}, run.count);
    }
    shares.emplace_back(at, static_cast<std::size_t>(block.elements(rows)));
    at += block.elements(rows);
  }
  const std::int64_t own = block.elements(plan.rows(rank));
  const std::span<float> sum = next_gradients.get(own);
  communicator.reduce_scatter(shares, sum, came_gradients.get(own), "gradients of keys summed");
  give_key_gradients(call, gradients, sum);
}

RankAttention::RankAttention(const Plan& plan, Communicator& communicator, Scheme scheme) {
  Check("distributed.rank_attention")
      .require(communicator.size() == plan.problem().ranks, "the plan is for ", plan.problem().ranks, " ranks and ",
               communicator.name(), " has ", communicator.size());
  state_ = std::make_unique<State>(plan, communicator, scheme);
}

RankAttention::~RankAttention() = default;

Scheme RankAttention::scheme() const { return state_->scheme; }

void RankAttention::forward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                            const TensorView& lse, const Options& options, const Runtime& runtime) {
  State& s = *state_;
  const Call call = checked_call(kForward, s.plan, s.rank, q, k, v, o, lse, options, runtime);
  s.agreement.require(words_of(call, s.plan, s.scheme, nullptr));
  Calls calls(options, runtime, s.workspace);
  if (s.scheme == Scheme::ring) {
    const Rows sum = s.new_sum(call);
    s.pass_keys_round(call, [&](int step, const TensorView& keys, const TensorView& values) {
      s.accumulate(calls, s.steps[static_cast<std::size_t>(step)], call, sum, keys, values);
    });
    s.finish(call, sum);
    return;
  }
  TensorView keys, values;
  s.gather_keys(call, keys, values);
  if (s.whole) {
    for (const Piece& piece : s.steps[0]) calls.forward(piece, {q, o, lse}, keys, values, true);
    return;
  }
  const Rows sum = s.new_sum(call);
  s.accumulate(calls, s.steps[0], call, sum, keys, values);
  s.finish(call, sum);
}

void RankAttention::backward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                             const TensorView& lse, const TensorView& d_o, const TensorView& d_lse,
                             const Gradients& gradients, const Options& options, const Runtime& runtime) {
  State& s = *state_;
  const Call call = checked_call(kBackward, s.plan, s.rank, q, k, v, o, lse, options, runtime);
  check_backward(call, d_o, d_lse, gradients);
  const bool dkv = gradients.dk.given() || gradients.dv.given();
  s.agreement.require(words_of(call, s.plan, s.scheme, &gradients));

  const std::int64_t rows = s.plan.rows(s.rank);
  Calls calls(options, runtime, s.workspace);
  const Rows of_rows{q, o, lse};
  RowGradients row_gradients{d_o, d_lse, {}};
  if (gradients.dq.given()) {
    row_gradients.dq = {
        s.row_gradients.filled(q.elements(), 0).data(), DType::f32, {q.shape[0], rows, q.shape[2], q.shape[3]}};
  }
  const KeyBlock block = call.gradients();
  // The gradients of a block of keys by some pieces.
  const auto add = [&](const std::vector<Piece>& pieces, const TensorView& keys, const TensorView& values,
                       std::span<float> sum) {
    const TensorView dk = dkv ? block.k(sum.data(), keys.shape[1]) : TensorView{};
    const TensorView dv = dkv ? block.v(sum.data(), keys.shape[1]) : TensorView{};
    for (const Piece& piece : pieces) {
      calls.backward(piece, of_rows, row_gradients, keys, values, dk, dv, !s.whole);
    }
  };

  if (s.scheme == Scheme::gather) {
    TensorView keys, values;
    s.gather_keys(call, keys, values);
    const std::span<float> all = s.key_gradients.filled(dkv ? block.elements(s.plan.problem().rows) : 0, 0);
    add(s.steps[0], keys, values, all);
    if (dkv) s.gather_key_gradients(call, gradients, all);
  } else {
    const int hops = s.plan.ring_hops();
    const std::span<float> own = s.key_gradients.filled(dkv ? block.elements(rows) : 0, 0);
    // Of other ranks' keys: what is on its way, and what is being summed.
    Floats* sent = &s.next_gradients;
    Floats* summed = &s.parts;
    std::span<float> came;
    std::unique_ptr<Transfer> transfer;
    s.pass_keys_round(call, [&](int step, const TensorView& keys, const TensorView& values) {
      if (step == 0) return add(s.steps[0], keys, values, own);
      const std::span<float> share = summed->filled(dkv ? block.elements(keys.shape[1]) : 0, 0);
      add(s.steps[static_cast<std::size_t>(step)], keys, values, share);
      if (!dkv) return;
      if (transfer) transfer->wait();  // the sum of the ranks before this one, and the last step's is sent
      for (std::size_t n = 0; n < came.size(); ++n) share[n] += came[n];
      const bool last = step == hops;  // then the sum goes home
      const int to = last ? s.rank_before(hops) : s.rank_before(s.ranks - 1);
      const int from = last ? s.rank_before(s.ranks - hops) : s.rank_before(1);
      came = s.came_gradients.get(block.elements(last ? rows : s.plan.rows(s.rank_before(step + 1))));
      transfer = s.communicator.exchange(std::as_bytes(share), to, std::as_writable_bytes(came), from,
                                         s.round("gradients of keys passed on", step));
      std::swap(sent, summed);
    });
    if (dkv) {
      if (transfer) transfer->wait();
      for (std::size_t n = 0; n < came.size(); ++n) own[n] += came[n];
      s.give_key_gradients(call, gradients, own);
    }
  }
  if (gradients.dq.given()) copy_rows({row_gradients.dq}, {gradients.dq}, rows);
  if (gradients.dsink.given()) {
    std::memset(gradients.dsink.data, 0, static_cast<std::size_t>(q.shape[2]) * sizeof(float));
    if (rows > 0 && q.shape[0] > 0) calls.sink_gradient(of_rows, row_gradients, k, v, gradients.dsink);
    s.communicator.all_reduce({static_cast<float*>(gradients.dsink.data), static_cast<std::size_t>(q.shape[2])},
                              s.parts.get(s.ranks * q.shape[2]), "gradient of the sink summed");
  }
}

}  // namespace heddle::distributed
