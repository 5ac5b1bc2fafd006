// Heads exchanged for rows inside of a group of ranks, which then is one rank of a plan of groups for its heads.
#include <algorithm>
#include <deque>
#include <utility>

#include "distributed/memory.h"
#include "distributed/scheme.h"
#include "distributed/subset.h"

namespace heddle::distributed {
namespace {

// Row n goes to rows[n]: a move for consecutive numbers, or those at one distance.
std::vector<RowMove> moves_to(const std::vector<std::int64_t>& rows) {
  std::vector<RowMove> out;
  for (std::size_t n = 0; n < rows.size(); ++n) {
    if (!out.empty()) {
      RowMove& move = out.back();
      if (move.count == 1 && rows[n] > move.to) move.to_step = rows[n] - move.to;
      if (move.to + move.to_step * move.count == rows[n]) {
        ++move.count;
        continue;
      }
    }
    out.push_back({.from = static_cast<std::int64_t>(n), .to = rows[n], .count = 1});
  }
  return out;
}

// Heads that one call takes, with as many query heads to each key head: a share less groups that are cut, and these.
std::vector<HeadShare> even_parts(const HeadShare& share, std::int64_t group) {
  std::vector<HeadShare> out;
  for (std::int64_t begin = share.begin; begin < share.end;) {
    const std::int64_t whole_groups = share.end / group * group;
    const std::int64_t next_group = (begin / group + 1) * group;
    const std::int64_t end =
        begin % group == 0 && whole_groups > begin ? whole_groups : std::min(next_group, share.end);
    out.push_back({begin, end, begin / group, (end + group - 1) / group});
    begin = end;
  }
  return out;
}

constexpr std::size_t kAlign = 64;
std::size_t aligned(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// A tensor on its way between a rank's rows with all heads, [B, rows, heads, D], and the group's rows with this rank's
// heads.
struct Moved {
  TensorView rows, heads;
  bool of_keys = false;
};

class SchemeOfHeads : public SchemeOfRank {
 public:
  SchemeOfHeads(const Plan& plan, Communicator& communicator, Memory& memory, Scheme scheme, Scheme across)
      : memory_(memory),
        size_(plan.ulysses(scheme)),
        place_(communicator.rank() % size_),
        groups_(plan.grouped(size_)),
        group_(communicator.rank() / size_),
        inside_(communicator, ranks_from(communicator.rank() - place_, 1, size_)),
        across_(communicator, ranks_from(place_, size_, communicator.size() / size_)),
        keys_(scheme_of_keys(groups_, across_, memory, across)) {
    for (int n = 0; n < kTensors; ++n) tensors_.emplace_back(memory);
    const std::vector<std::int64_t> places = groups_.inverse(), whole = plan.permutation();
    std::int64_t first = 0, before = 0;
    for (int g = 0; g < group_; ++g) before += groups_.rows(g);
    for (int rank = 0; rank < plan.problem().ranks; ++rank) {
      if (rank / size_ == group_) {
        std::vector<std::int64_t> rows;
        for (std::int64_t n = first; n < first + plan.rows(rank); ++n) {
          rows.push_back(places[static_cast<std::size_t>(whole[static_cast<std::size_t>(n)])] - before);
        }
        lengths_.push_back(plan.rows(rank));
        to_group_.push_back(moves_to(rows));
        from_group_.push_back(reversed(to_group_.back()));
      }
      first += plan.rows(rank);
    }
  }

  void forward(const Call& call) override;
  std::span<float> backward(const Call& call, const RowGradients& gradients, bool dkv) override;

 private:
  static std::vector<int> ranks_from(int first, int step, int count) {
    std::vector<int> out;
    for (int n = 0; n < count; ++n) out.push_back(first + step * n);
    return out;
  }
  // What this rank computes with: the group's rows, its own heads.
  struct HeadCall {
    TensorView q, k, v, o, lse, d_o, d_lse, dq, dk, dv;
  };
  HeadCall tensors(const Call& call);
  // Calls use(call, share) for the heads of each even part, share as the heads lie in the tensors.
  template <class Use>
  void for_each_part(const Call& call, const HeadCall& own, const Use& use);

  HeadShare share_of(const Moved& x, int member) const {
    const HeadShare& share = shares_[static_cast<std::size_t>(member)];
    return x.of_keys ? HeadShare{share.kv_begin, share.kv_end, 0, 0} : share;
  }
  // A member's rows with a member's heads of one tensor, as they lie in a message.
  TensorView block(const Moved& x, int rows_of, int heads_of, std::byte* data) const {
    const HeadShare share = share_of(x, heads_of);
    return memory_.view(
        data, x.rows.dtype,
        {x.rows.shape[0], lengths_[static_cast<std::size_t>(rows_of)], share.end - share.begin, x.rows.shape[3]});
  }
  // there: from rows to heads. Back, rows of keys, f32 and 0 before, get the sum of what members send, in their order.
  // Tensors of f32 come first: each member's message begins at a multiple of kAlign bytes.
  void move(const std::vector<Moved>& tensors, bool there, const std::string& what);
  void move_there(const std::vector<Moved>& tensors, const std::string& what) { move(tensors, true, what); }
  void move_back(const std::vector<Moved>& tensors, const std::string& what) { move(tensors, false, what); }
  TensorView tensor(std::size_t n, DType dtype, std::initializer_list<std::int64_t> shape) {
    return tensors_[n].get(dtype, shape);
  }

  static constexpr int kTensors = 10;
  Memory& memory_;
  const int size_, place_;
  const Plan groups_;
  const int group_;
  Subset inside_, across_;
  const std::unique_ptr<SchemeOfRank> keys_;
  std::vector<std::int64_t> lengths_;                        // of each member's rows
  std::vector<std::vector<RowMove>> to_group_, from_group_;  // of each member: where they are among the group's
  std::vector<HeadShare> shares_;                            // of each member, in the call at hand
  std::deque<Buffer> tensors_;
  Buffer sent_{memory_}, came_{memory_}, own_lse_{memory_};
  Floats key_gradients_{memory_}, no_d_lse_{memory_};
};

void SchemeOfHeads::move(const std::vector<Moved>& tensors, bool there, const std::string& what) {
  const auto rows_sent = [&](int member) { return there ? place_ : member; };
  const auto heads_sent = [&](int member) { return there ? member : place_; };
  const auto total = [&](bool sent) {
    std::size_t sum = 0;
    for (int member = 0; member < size_; ++member) {
      sum = aligned(sum);
      for (const Moved& x : tensors) {
        const TensorView view = sent ? block(x, rows_sent(member), heads_sent(member), nullptr)
                                     : block(x, heads_sent(member), rows_sent(member), nullptr);
        sum += static_cast<std::size_t>(view.elements()) * size_of(view.dtype);
      }
    }
    return sum;
  };
  std::byte *const out_memory = sent_.get(total(true)), *const in_memory = came_.get(total(false));
  std::size_t out_bytes = 0, in_bytes = 0;
  std::vector<std::span<const std::byte>> sent;
  std::vector<std::span<std::byte>> came;
  for (int member = 0; member < size_; ++member) {
    out_bytes = aligned(out_bytes), in_bytes = aligned(in_bytes);
    const std::size_t out_begin = out_bytes, in_begin = in_bytes;
    for (const Moved& x : tensors) {
      const TensorView packed = block(x, rows_sent(member), heads_sent(member), out_memory + out_bytes);
      const HeadShare share = share_of(x, member);
      if (there) {
        memory_.copy_rows(part(x.rows, 2, share.begin, share.end), packed, packed.shape[1]);
      } else {
        memory_.copy_rows(x.heads, packed, from_group_[static_cast<std::size_t>(member)]);
      }
      const TensorView coming = block(x, heads_sent(member), rows_sent(member), in_memory + in_bytes);
      out_bytes += static_cast<std::size_t>(packed.elements()) * size_of(packed.dtype);
      in_bytes += static_cast<std::size_t>(coming.elements()) * size_of(coming.dtype);
    }
    sent.emplace_back(out_memory + out_begin, out_bytes - out_begin);
    came.emplace_back(in_memory + in_begin, in_bytes - in_begin);
  }
  inside_.all_to_all(sent, came, what);
  for (int member = 0; member < size_; ++member) {
    std::byte* at = came[static_cast<std::size_t>(member)].data();
    for (const Moved& x : tensors) {
      const TensorView packed = block(x, heads_sent(member), rows_sent(member), at);
      const HeadShare share = share_of(x, member);
      if (there) {
        memory_.copy_rows(packed, x.heads, to_group_[static_cast<std::size_t>(member)]);
      } else if (x.of_keys) {
        const RowMove all{.count = packed.shape[1]};
        memory_.add_rows(packed, part(x.rows, 2, share.begin, share.end), {&all, 1});
      } else {
        memory_.copy_rows(packed, part(x.rows, 2, share.begin, share.end), packed.shape[1]);
      }
      at += static_cast<std::size_t>(packed.elements()) * size_of(packed.dtype);
    }
  }
}

SchemeOfHeads::HeadCall SchemeOfHeads::tensors(const Call& call) {
  shares_ = head_shares(call.heads(), call.keys.heads, size_);
  const HeadShare& share = shares_[static_cast<std::size_t>(place_)];
  const std::int64_t B = call.batch(), rows = groups_.rows(group_), H = share.end - share.begin,
                     Hkv = share.kv_end - share.kv_begin, D = call.keys.head_size, Dv = call.keys.head_size_v;
  const DType dtype = call.keys.dtype;
  return {.q = tensor(0, dtype, {B, rows, H, D}),
          .k = tensor(1, dtype, {B, rows, Hkv, D}),
          .v = tensor(2, dtype, {B, rows, Hkv, Dv}),
          .o = tensor(3, call.o.dtype, {B, rows, H, Dv}),
          .lse = tensor(4, DType::f32, {B, H, rows}),
          .d_o = {},
          .d_lse = {},
          .dq = {},
          .dk = {},
          .dv = {}};
}

template <class Use>
void SchemeOfHeads::for_each_part(const Call& call, const HeadCall& own, const Use& use) {
  const HeadShare& share = shares_[static_cast<std::size_t>(place_)];
  for (const HeadShare& heads : even_parts(share, call.heads() / call.keys.heads)) {
    const HeadShare at{heads.begin - share.begin, heads.end - share.begin, heads.kv_begin - share.kv_begin,
                       heads.kv_end - share.kv_begin};
    const TensorView q = part(own.q, 2, at.begin, at.end), k = part(own.k, 2, at.kv_begin, at.kv_end),
                     v = part(own.v, 2, at.kv_begin, at.kv_end), o = part(own.o, 2, at.begin, at.end),
                     lse = part(own.lse, 1, at.begin, at.end);
    Options options = call.options;
    for (TensorView* x : {&options.alibi_slopes, &options.sink}) {
      if (x->given()) *x = part(*x, 0, heads.begin, heads.end);
    }
    KeyBlock keys = call.keys;
    keys.heads = at.kv_end - at.kv_begin;
    use(Call{q, k, v, o, lse, options, call.runtime, keys}, at);
  }
}

void SchemeOfHeads::forward(const Call& call) {
  const HeadCall own = tensors(call);
  move_there({{call.q, own.q}, {call.k, own.k, true}, {call.v, own.v, true}}, "rows exchanged for heads");
  for_each_part(call, own, [&](const Call& part_of_heads, const HeadShare&) { keys_->forward(part_of_heads); });
  TensorView lse = call.lse;
  if (!lse.given()) {  // it is sent all the same: who wants it is not compared
    lse = own_lse_.get(DType::f32, {call.batch(), call.heads(), call.q.shape[1]});
  }
  move_back({{lse_as_rows(lse), lse_as_rows(own.lse)}, {call.o, own.o}}, "heads exchanged for rows");
}

std::span<float> SchemeOfHeads::backward(const Call& call, const RowGradients& gradients, bool dkv) {
  HeadCall own = tensors(call);
  own.d_o = tensor(5, call.o.dtype, {own.o.shape[0], own.o.shape[1], own.o.shape[2], own.o.shape[3]});
  own.d_lse = tensor(6, DType::f32, {own.lse.shape[0], own.lse.shape[1], own.lse.shape[2]});
  TensorView d_lse = gradients.d_lse;
  if (!d_lse.given()) {
    d_lse = memory_.view(no_d_lse_.filled(call.lse.elements(), 0).data(), DType::f32,
                         {call.lse.shape[0], call.lse.shape[1], call.lse.shape[2]});
  }
  move_there({{lse_as_rows(call.lse), lse_as_rows(own.lse)},
              {lse_as_rows(d_lse), lse_as_rows(own.d_lse)},
              {call.o, own.o},
              {gradients.d_o, own.d_o},
              {call.q, own.q},
              {call.k, own.k, true},
              {call.v, own.v, true}},
             "rows and gradients exchanged for heads");
  std::vector<Moved> moved;
  const std::int64_t rows = call.q.shape[1];
  std::span<float> complete;
  const KeyBlock block = call.gradients();
  if (dkv) {
    own.dk = tensor(7, DType::f32, {own.k.shape[0], own.k.shape[1], own.k.shape[2], own.k.shape[3]});
    own.dv = tensor(8, DType::f32, {own.v.shape[0], own.v.shape[1], own.v.shape[2], own.v.shape[3]});
    complete = key_gradients_.filled(block.elements(rows), 0);
    moved.push_back({block.k(complete.data(), rows), own.dk, true});
    moved.push_back({block.v(complete.data(), rows), own.dv, true});
  }
  if (gradients.dq.given()) {
    own.dq = tensor(9, gradients.dq.dtype, {own.q.shape[0], own.q.shape[1], own.q.shape[2], own.q.shape[3]});
    moved.push_back({gradients.dq, own.dq});
  }
  for_each_part(call, own, [&](const Call& part_of_heads, const HeadShare& at) {
    const RowGradients of_part{part(own.d_o, 2, at.begin, at.end), part(own.d_lse, 1, at.begin, at.end),
                               own.dq.given() ? part(own.dq, 2, at.begin, at.end) : TensorView{}};
    const std::span<float> found = keys_->backward(part_of_heads, of_part, dkv);
    if (!dkv) return;
    const KeyBlock of_keys = part_of_heads.gradients();
    const std::int64_t all = own.k.shape[1];
    memory_.copy_rows(of_keys.k(found.data(), all), part(own.dk, 2, at.kv_begin, at.kv_end), all);
    memory_.copy_rows(of_keys.v(found.data(), all), part(own.dv, 2, at.kv_begin, at.kv_end), all);
  });
  move_back(moved, "gradients of heads exchanged for those of rows");
  return complete;
}

}  // namespace

std::unique_ptr<SchemeOfRank> scheme_of_heads(const Plan& plan, Communicator& communicator, Memory& memory,
                                              Scheme scheme, Scheme across) {
  return std::make_unique<SchemeOfHeads>(plan, communicator, memory, scheme, across);
}

}  // namespace heddle::distributed
