// Keys go to rows: gathered, passed round, or only those that are needed; pieces run, gradients of keys brought home.
#include <algorithm>
#include <limits>
#include <utility>

#include "distributed/cuts.h"
#include "distributed/memory.h"
#include "distributed/pieces.h"
#include "distributed/scheme.h"
#include "heddle/partial.h"

namespace heddle::distributed {
namespace {

using Moves = std::vector<RowMove>;

// The rows of a rank's tensors to where they are in the whole.
Moves to_whole(const std::vector<Run>& runs) {
  Moves out;
  for (const Run& run : runs) out.push_back({run.local, 1, run.begin, run.step, run.count});
  return out;
}

// Of the keys that some rank needs those of rank `from`, ascending: from its tensors to the former's buffer.
Moves needed_moves(const Plan& plan, const std::vector<Run>& needed, int from) {
  std::vector<Run> own = plan.runs(from);
  std::ranges::sort(own, {}, &Run::begin);
  Moves out;
  for (const Run& keys : needed) {
    for (const Run& run : inside(own, keys.begin, keys.begin + keys.count)) {
      out.push_back({run.local, 1, run.begin + keys.local - keys.begin, run.step, run.count});
    }
  }
  return out;
}

std::int64_t rows_of(const Moves& moves) {
  std::int64_t sum = 0;
  for (const RowMove& move : moves) sum += move.count;
  return sum;
}

// The same rows, in this order, from (to) a message that has nothing else.
Moves from_message(Moves moves) {
  std::int64_t at = 0;
  for (RowMove& move : moves) move.from = std::exchange(at, at + move.count), move.from_step = 1;
  return moves;
}
Moves to_message(const Moves& moves) { return reversed(from_message(reversed(moves))); }

class SchemeOfKeys : public SchemeOfRank {
 public:
  SchemeOfKeys(const Plan& plan, Communicator& communicator, Memory& memory, Scheme scheme)
      : plan_(plan),
        communicator_(communicator),
        memory_(memory),
        scheme_(scheme),
        rank_(communicator.rank()),
        ranks_(communicator.size()) {
    if (scheme_ == Scheme::ring) {
      steps_ = plan.ring_pieces(rank_);
    } else if (scheme_ == Scheme::needed) {
      steps_ = {plan.needed_pieces(rank_)};
      const std::vector<Run> needed = plan.needed_keys(rank_);
      for (int r = 0; r < ranks_; ++r) {
        got_.push_back(from_message(needed_moves(plan, needed, r)));
        keys_ += rows_of(got_.back());
        given_.push_back(to_message(needed_moves(plan, plan.needed_keys(r), rank_)));
      }
    } else {
      steps_ = {plan.gather_pieces(rank_)};
      keys_ = plan.problem().rows;
      for (int r = 0; r < ranks_; ++r) got_.push_back(to_whole(plan.runs(r)));
    }
    whole_ = scheme_ != Scheme::ring && cover_once(steps_.front(), plan.rows(rank_));
  }

  void forward(const Call& call) override;
  std::span<float> backward(const Call& call, const RowGradients& gradients, bool dkv) override;

 private:
  // A bias goes with one sequence at a time.
  const std::vector<std::vector<Piece>>& steps_of(const Call& call) {
    if (!call.options.bias.given()) return steps_;
    if (unpacked_.empty()) {
      for (const std::vector<Piece>& step : steps_) unpacked_.push_back(one_sequence_each(step));
    }
    return unpacked_;
  }
  int rank_before(int n) const { return (rank_ - n % ranks_ + ranks_) % ranks_; }
  std::string round(const char* what, int step) const {
    return std::string(what) + ", step " + std::to_string(step) + " of " + std::to_string(plan_.ring_hops());
  }

  void put_keys(const Call& call, void* data) const;
  // k and v, or what was summed for them, in two blocks.
  void copy_block(const KeyBlock& block, void* from, std::int64_t from_rows, void* to, std::int64_t to_rows,
                  const Moves& moves) const {
    memory_.copy_rows(block.k(from, from_rows), block.k(to, to_rows), moves);
    memory_.copy_rows(block.v(from, from_rows), block.v(to, to_rows), moves);
  }
  // All keys in the whole's order, or those that are needed in the order of the buffer.
  void keys_at_once(const Call& call, TensorView& k, TensorView& v);
  void gather_keys(const Call& call, TensorView& k, TensorView& v);
  void fetch_keys(const Call& call, TensorView& k, TensorView& v);
  void put_in_order(const KeyBlock& keys, const std::vector<std::span<std::byte>>& came, TensorView& k, TensorView& v);
  // Calls use(step, k, v) while the next step's keys are on their way.
  template <class Use>
  void pass_keys_round(const Call& call, const Use& use);

  // Partial results of the rank's rows: o f32, 0 and lse -inf where there is none yet.
  void accumulate(Calls& calls, const std::vector<Piece>& pieces, const Call& call, const Rows& sum,
                  const TensorView& k, const TensorView& v);
  Rows new_sum(const Call& call);
  void finish(const Call& call, const Rows& sum) const;

  // share: what this rank adds to the gradients of all keys, or of those that it needs.
  std::span<float> gather_key_gradients(const Call& call, std::span<float> share);
  std::span<float> return_key_gradients(const Call& call, std::span<float> share);

  const Plan& plan_;
  Communicator& communicator_;
  Memory& memory_;
  const Scheme scheme_;
  const int rank_, ranks_;
  std::vector<std::vector<Piece>> steps_;     // of `ring` one for each rank whose keys come by
  bool whole_ = false;                        // each row is in one piece: nothing is merged
  std::int64_t keys_ = 0;                     // in the buffer of `gather` and `needed`
  std::vector<Moves> got_;                    // of these: from each rank's message to the buffer
  std::vector<Moves> given_;                  // of `needed`: from the rank's rows to the message for each rank
  std::vector<std::vector<Piece>> unpacked_;  // steps_, for calls with a bias: pieces of one sequence
  CallMemory call_memory_{memory_};
  Buffer sent_keys_{memory_}, came_keys_{memory_}, ordered_keys_{memory_};
  Floats sum_o_{memory_}, sum_lse_{memory_}, part_o_{memory_}, part_lse_{memory_}, row_gradients_{memory_},
      key_gradients_{memory_}, next_gradients_{memory_}, came_gradients_{memory_}, parts_{memory_};
};

void SchemeOfKeys::put_keys(const Call& call, void* data) const {
  const std::int64_t rows = plan_.rows(rank_);
  memory_.copy_rows(call.k, call.keys.k(data, rows), rows);
  memory_.copy_rows(call.v, call.keys.v(data, rows), rows);
}

void SchemeOfKeys::keys_at_once(const Call& call, TensorView& k, TensorView& v) {
  if (ranks_ == 1 && scheme_ == Scheme::gather) {  // one rank has its rows in the whole's order
    k = call.k, v = call.v;
  } else if (scheme_ == Scheme::gather) {
    gather_keys(call, k, v);
  } else {
    fetch_keys(call, k, v);
  }
}

void SchemeOfKeys::fetch_keys(const Call& call, TensorView& k, TensorView& v) {
  const KeyBlock& keys = call.keys;
  std::int64_t out_rows = 0;
  for (const Moves& given : given_) out_rows += rows_of(given);
  std::byte *out = sent_keys_.get(keys.bytes(out_rows)), *in = came_keys_.get(keys.bytes(keys_));
  std::vector<std::span<const std::byte>> sent;
  std::vector<std::span<std::byte>> came;
  for (std::size_t r = 0; r < given_.size(); ++r) {
    const std::int64_t rows = rows_of(given_[r]);
    memory_.copy_rows(call.k, keys.k(out, rows), given_[r]);
    memory_.copy_rows(call.v, keys.v(out, rows), given_[r]);
    sent.emplace_back(out, keys.bytes(rows));
    out += sent.back().size();
    came.emplace_back(in, keys.bytes(rows_of(got_[r])));
    in += came.back().size();
  }
  communicator_.all_to_all(sent, came, "needed keys sent");
  put_in_order(keys, came, k, v);
}

void SchemeOfKeys::gather_keys(const Call& call, TensorView& k, TensorView& v) {
  const KeyBlock& keys = call.keys;
  const std::size_t own_bytes = keys.bytes(plan_.rows(rank_));
  std::byte* const own = sent_keys_.get(own_bytes);
  put_keys(call, own);
  std::byte* at = came_keys_.get(keys.bytes(keys_));
  std::vector<std::span<std::byte>> came;
  for (int r = 0; r < ranks_; ++r) {
    came.emplace_back(at, keys.bytes(plan_.rows(r)));
    at += came.back().size();
  }
  communicator_.all_gather({own, own_bytes}, came, "keys gathered");
  put_in_order(keys, came, k, v);
}

void SchemeOfKeys::put_in_order(const KeyBlock& keys, const std::vector<std::span<std::byte>>& came, TensorView& k,
                                TensorView& v) {
  void* const ordered = ordered_keys_.get(keys.bytes(keys_));
  k = keys.k(ordered, keys_);
  v = keys.v(ordered, keys_);
  for (std::size_t r = 0; r < came.size(); ++r) {
    copy_block(keys, came[r].data(), rows_of(got_[r]), ordered, keys_, got_[r]);
  }
}

template <class Use>
void SchemeOfKeys::pass_keys_round(const Call& call, const Use& use) {
  std::int64_t most = 0;
  for (int r = 0; r < ranks_; ++r) most = std::max(most, plan_.rows(r));
  const std::size_t bytes = call.keys.bytes(most);
  std::byte *here = sent_keys_.get(bytes), *next = came_keys_.get(bytes);
  put_keys(call, here);
  for (int step = 0; step <= plan_.ring_hops(); ++step) {
    const std::int64_t rows = plan_.rows(rank_before(step)), rows_next = plan_.rows(rank_before(step + 1));
    std::unique_ptr<Transfer> transfer;
    if (step < plan_.ring_hops()) {
      transfer =
          communicator_.exchange({here, call.keys.bytes(rows)}, rank_before(ranks_ - 1),
                                 {next, call.keys.bytes(rows_next)}, rank_before(1), round("keys passed on", step + 1));
    }
    use(step, call.keys.k(here, rows), call.keys.v(here, rows));
    if (transfer) transfer->wait();
    std::swap(here, next);
  }
}

Rows SchemeOfKeys::new_sum(const Call& call) {
  const std::int64_t rows = plan_.rows(rank_), B = call.batch(), H = call.heads(), Dv = call.keys.head_size_v;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  return {call.q, memory_.view(sum_o_.filled(B * rows * H * Dv, 0).data(), DType::f32, {B, rows, H, Dv}),
          memory_.view(sum_lse_.filled(B * H * rows, kNone).data(), DType::f32, {B, H, rows})};
}

void SchemeOfKeys::accumulate(Calls& calls, const std::vector<Piece>& pieces, const Call& call, const Rows& sum,
                              const TensorView& k, const TensorView& v) {
  const std::int64_t B = call.batch(), H = call.heads(), Dv = call.keys.head_size_v;
  for (const Piece& piece : pieces) {
    if (piece.first) {
      calls.forward(piece, sum, k, v, false);
      continue;
    }
    // As large as all rows, of which the piece's are written.
    const std::int64_t rows = plan_.rows(rank_);
    const Rows one{call.q, memory_.view(part_o_.get(B * rows * H * Dv).data(), DType::f32, {B, rows, H, Dv}),
                   memory_.view(part_lse_.get(B * H * rows).data(), DType::f32, {B, H, rows})};
    calls.forward(piece, one, k, v, false);
    const auto of_piece = [&](const Rows& x) {
      return Partial{part(x.o, 1, piece.q_begin, piece.q_end), part(x.lse, 2, piece.q_begin, piece.q_end)};
    };
    const Partial partials[] = {of_piece(sum), of_piece(one)};
    merge_attention(partials, partials[0].o, partials[0].lse, {}, call.runtime);
  }
}

// The sink enters here, once.
void SchemeOfKeys::finish(const Call& call, const Rows& sum) const {
  if (call.options.sink.given()) {
    const Partial all[] = {{sum.o, sum.lse}};
    merge_attention(all, sum.o, sum.lse, {.sink = call.options.sink}, call.runtime);
  }
  const std::int64_t rows = plan_.rows(rank_);
  memory_.copy_rows(sum.o, call.o, rows);
  if (call.lse.given()) memory_.copy_rows(lse_as_rows(sum.lse), lse_as_rows(call.lse), rows);
}

std::span<float> SchemeOfKeys::gather_key_gradients(const Call& call, std::span<float> share) {
  if (ranks_ == 1) return share;
  const KeyBlock block = call.gradients();
  float* at = parts_.get(block.elements(keys_)).data();
  std::vector<std::span<const float>> shares;
  for (int r = 0; r < ranks_; ++r) {
    const std::int64_t rows = plan_.rows(r);
    copy_block(block, share.data(), keys_, at, rows, reversed(got_[static_cast<std::size_t>(r)]));
    shares.emplace_back(at, static_cast<std::size_t>(block.elements(rows)));
    at += block.elements(rows);
  }
  const std::int64_t own = block.elements(plan_.rows(rank_));
  const std::span<float> sum = next_gradients_.get(own);
  const int copies = memory_.device() == Device::cpu ? 1 : ranks_;
  communicator_.reduce_scatter(shares, sum, came_gradients_.get(copies * own), "gradients of keys summed");
  return sum;
}

// Of each key the shares of those ranks that need it, in the order of ranks.
std::span<float> SchemeOfKeys::return_key_gradients(const Call& call, std::span<float> share) {
  const KeyBlock block = call.gradients();
  std::int64_t in_rows = 0;
  for (const Moves& given : given_) in_rows += rows_of(given);
  float* out = parts_.get(block.elements(keys_)).data();
  float* in = came_gradients_.get(block.elements(in_rows)).data();
  std::vector<std::span<const std::byte>> sent;
  std::vector<std::span<std::byte>> came;
  for (std::size_t r = 0; r < got_.size(); ++r) {
    const std::int64_t rows = rows_of(got_[r]);
    copy_block(block, share.data(), keys_, out, rows, reversed(got_[r]));
    sent.emplace_back(reinterpret_cast<const std::byte*>(out), block.bytes(rows));
    out += block.elements(rows);
    came.emplace_back(reinterpret_cast<std::byte*>(in), block.bytes(rows_of(given_[r])));
    in += block.elements(rows_of(given_[r]));
  }
  communicator_.all_to_all(sent, came, "gradients of needed keys returned");
  const std::int64_t own = plan_.rows(rank_);
  const std::span<float> sum = next_gradients_.filled(block.elements(own), 0);
  for (std::size_t r = 0; r < given_.size(); ++r) {
    const std::int64_t rows = rows_of(given_[r]);
    const Moves moves = reversed(given_[r]);
    memory_.add_rows(block.k(came[r].data(), rows), block.k(sum.data(), own), moves);
    memory_.add_rows(block.v(came[r].data(), rows), block.v(sum.data(), own), moves);
  }
  return sum;
}

void SchemeOfKeys::forward(const Call& call) {
  Calls calls(call.options, call.runtime, call_memory_);
  const auto& steps = steps_of(call);
  if (scheme_ == Scheme::ring) {
    const Rows sum = new_sum(call);
    pass_keys_round(call, [&](int step, const TensorView& keys, const TensorView& values) {
      accumulate(calls, steps[static_cast<std::size_t>(step)], call, sum, keys, values);
    });
    finish(call, sum);
    return;
  }
  TensorView keys, values;
  keys_at_once(call, keys, values);
  if (whole_) {
    for (const Piece& piece : steps[0]) calls.forward(piece, {call.q, call.o, call.lse}, keys, values, true);
    return;
  }
  const Rows sum = new_sum(call);
  accumulate(calls, steps[0], call, sum, keys, values);
  finish(call, sum);
}

std::span<float> SchemeOfKeys::backward(const Call& call, const RowGradients& gradients, bool dkv) {
  const std::int64_t rows = plan_.rows(rank_);
  Calls calls(call.options, call.runtime, call_memory_);
  const auto& steps = steps_of(call);
  const Rows of_rows{call.q, call.o, call.lse};
  RowGradients row_gradients{gradients.d_o, gradients.d_lse, {}, gradients.dbias};
  if (gradients.dq.given()) {
    const auto& shape = call.q.shape;
    row_gradients.dq = memory_.view(row_gradients_.filled(call.q.elements(), 0).data(), DType::f32,
                                    {shape[0], rows, shape[2], shape[3]});
  }
  const KeyBlock block = call.gradients();
  // The gradients of a block of keys by some pieces.
  const auto add = [&](const std::vector<Piece>& pieces, const TensorView& keys, const TensorView& values,
                       std::span<float> sum) {
    const TensorView dk = dkv ? block.k(sum.data(), keys.shape[1]) : TensorView{};
    const TensorView dv = dkv ? block.v(sum.data(), keys.shape[1]) : TensorView{};
    for (const Piece& piece : pieces) {
      calls.backward(piece, of_rows, row_gradients, keys, values, dk, dv, !whole_);
    }
  };

  std::span<float> complete;
  if (scheme_ != Scheme::ring) {
    TensorView keys, values;
    keys_at_once(call, keys, values);
    const std::span<float> share = key_gradients_.filled(dkv ? block.elements(keys_) : 0, 0);
    add(steps[0], keys, values, share);
    if (dkv) {
      complete = scheme_ == Scheme::gather ? gather_key_gradients(call, share) : return_key_gradients(call, share);
    }
  } else {
    const int hops = plan_.ring_hops();
    const std::span<float> own = key_gradients_.filled(dkv ? block.elements(rows) : 0, 0);
    // Of other ranks' keys: what is on its way, and what is being summed.
    Floats* sent = &next_gradients_;
    Floats* summed = &parts_;
    std::span<float> came;
    std::unique_ptr<Transfer> transfer;
    pass_keys_round(call, [&](int step, const TensorView& keys, const TensorView& values) {
      if (step == 0) return add(steps[0], keys, values, own);
      const std::span<float> share = summed->filled(dkv ? block.elements(keys.shape[1]) : 0, 0);
      add(steps[static_cast<std::size_t>(step)], keys, values, share);
      if (!dkv) return;
      if (transfer) transfer->wait();  // the sum of the ranks before this one, and the last step's is sent
      memory_.add(share, came);
      const bool last = step == hops;  // then the sum goes home
      const int to = last ? rank_before(hops) : rank_before(ranks_ - 1);
      const int from = last ? rank_before(ranks_ - hops) : rank_before(1);
      came = came_gradients_.get(block.elements(last ? rows : plan_.rows(rank_before(step + 1))));
      transfer = communicator_.exchange(std::as_bytes(share), to, std::as_writable_bytes(came), from,
                                        round("gradients of keys passed on", step));
      std::swap(sent, summed);
    });
    if (transfer) transfer->wait();
    memory_.add(own, came);
    complete = own;
  }
  if (gradients.dq.given()) memory_.copy_rows(row_gradients.dq, gradients.dq, rows);
  return complete;
}

}  // namespace

std::unique_ptr<SchemeOfRank> scheme_of_keys(const Plan& plan, Communicator& communicator, Memory& memory,
                                             Scheme scheme) {
  return std::make_unique<SchemeOfKeys>(plan, communicator, memory, scheme);
}

}  // namespace heddle::distributed
