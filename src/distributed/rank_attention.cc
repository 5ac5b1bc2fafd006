// A rank's share: arguments checked and compared, the scheme run, the gradient of the sink summed.
#include "distributed/memory.h"
#include "distributed/scheme.h"

namespace heddle::distributed {

struct RankAttention::State {
  State(const Plan& plan, Communicator& communicator, Scheme scheme)
      : plan(plan),
        communicator(communicator, "distributed.attention", digest_text(plan.digest())),
        scheme(scheme == Scheme::automatic ? plan.chosen() : scheme),
        across(this->scheme == Scheme::two_dimensional ? plan.across() : Scheme::gather),
        agreement(this->communicator),
        memory(memory_on(communicator.device())),
        run(heads_move(this->scheme) ? scheme_of_heads(plan, this->communicator, *memory, this->scheme, across)
                                     : scheme_of_keys(plan, this->communicator, *memory, this->scheme)) {}

  const Plan& plan;
  Named communicator;
  const Scheme scheme, across;
  Agreement agreement;
  const std::unique_ptr<Memory> memory;
  const std::unique_ptr<SchemeOfRank> run;
  CallMemory of_sink{*memory};
  Floats sinks{*memory};
};

namespace {

// A call on a stream.
class OnStream {
 public:
  OnStream(Memory& memory, Communicator& communicator, void* stream) : memory_(memory) {
    memory.use_stream(stream);
    communicator.use_stream(stream);
  }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;
  ~OnStream() { memory_.end_of_call(); }

 private:
  Memory& memory_;
};

// What fails because an exchange has says that.
template <class Body>
void with_the_reason(Communicator& communicator, const Body& body) {
  try {
    body();
  } catch (const RuntimeError&) {
    communicator.throw_if_failed();
    throw;
  }
}

constexpr std::int64_t kMostParts = 8;  // more of them save next to nothing

// Key heads [kv_begin, kv_end) and the query heads of their groups.
struct Heads {
  std::int64_t begin, end, kv_begin, kv_end;

  TensorView of(const TensorView& x, int n, bool of_keys = false) const {
    if (!x.given()) return x;
    return of_keys ? part(x, n, kv_begin, kv_end) : part(x, n, begin, end);
  }
  // Of a bias, or its gradient, which may be the same for all heads.
  TensorView of_bias(const TensorView& x) const { return x.given() && x.shape[1] > 1 ? of(x, 1) : x; }
};

// Calls use(call, heads): once for all, or for equal parts of the key heads, one after the other.
template <class Use>
void for_each_part(const Call& call, bool chunked, const Use& use) {
  const std::int64_t kv_heads = call.keys.heads, group = call.heads() / kv_heads;
  std::int64_t parts = 1;
  for (std::int64_t n = 2; chunked && n <= kMostParts; ++n) parts = kv_heads % n == 0 ? n : parts;
  if (parts == 1) return use(call, Heads{0, call.heads(), 0, kv_heads});
  const std::int64_t size = kv_heads / parts;
  for (std::int64_t begin = 0; begin < kv_heads; begin += size) {
    const Heads heads{begin * group, (begin + size) * group, begin, begin + size};
    const TensorView q = heads.of(call.q, 2), k = heads.of(call.k, 2, true), v = heads.of(call.v, 2, true),
                     o = heads.of(call.o, 2), lse = heads.of(call.lse, 1);
    Options options = call.options;
    options.alibi_slopes = heads.of(options.alibi_slopes, 0);
    options.sink = heads.of(options.sink, 0);
    options.bias = heads.of_bias(options.bias);
    KeyBlock keys = call.keys;
    keys.heads = size;
    use(Call{q, k, v, o, lse, options, call.runtime, keys}, heads);
  }
}

}  // namespace

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
  const Call call = checked_call(kForward, s.plan, s.scheme, s.communicator, q, k, v, o, lse, options, runtime);
  const OnStream here(*s.memory, s.communicator, runtime.stream);
  with_the_reason(s.communicator, [&] {
    s.agreement.require(words_of(call, s.plan, s.scheme, s.across, nullptr));
    for_each_part(call, options.chunked && !heads_move(s.scheme),
                  [&](const Call& one, const Heads&) { s.run->forward(one); });
  });
}

void RankAttention::backward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                             const TensorView& lse, const TensorView& d_o, const TensorView& d_lse,
                             const Gradients& gradients, const Options& options, const Runtime& runtime) {
  State& s = *state_;
  const Call call = checked_call(kBackward, s.plan, s.scheme, s.communicator, q, k, v, o, lse, options, runtime);
  check_backward(call, s.plan, s.scheme, d_o, d_lse, gradients);
  const bool dkv = gradients.dk.given() || gradients.dv.given();
  const OnStream here(*s.memory, s.communicator, runtime.stream);
  with_the_reason(s.communicator, [&] {
    s.agreement.require(words_of(call, s.plan, s.scheme, s.across, &gradients));

    const std::int64_t rows = q.shape[1], H = q.shape[2];
    if (gradients.dbias.given()) {
      s.memory->fill({static_cast<float*>(gradients.dbias.data), static_cast<std::size_t>(gradients.dbias.elements())},
                     0);
    }
    for_each_part(call, options.chunked && !heads_move(s.scheme), [&](const Call& one, const Heads& heads) {
      const RowGradients of_rows{heads.of(d_o, 2), heads.of(d_lse, 1), heads.of(gradients.dq, 2),
                                 heads.of_bias(gradients.dbias)};
      const std::span<float> of_keys = s.run->backward(one, of_rows, dkv);
      const KeyBlock block = one.gradients();
      const auto bring = [&](const TensorView& from, const TensorView& to) {
        if (to.given()) s.memory->copy_rows(from, heads.of(to, 2, true), rows);
      };
      bring(block.k(of_keys.data(), rows), gradients.dk);
      bring(block.v(of_keys.data(), rows), gradients.dv);
    });
    if (!gradients.dsink.given()) return;
    // Sent from memory of the rank's own, which transports reach.
    const std::span<float> sinks = s.sinks.filled((s.communicator.size() + 1) * H, 0);
    const std::span<float> sum = sinks.first(static_cast<std::size_t>(H));
    if (rows > 0 && q.shape[0] > 0) {
      Calls(options, runtime, s.of_sink)
          .sink_gradient({q, o, lse}, {d_o, d_lse, {}}, k, v, s.memory->view(sum.data(), DType::f32, {H}));
    }
    s.communicator.all_reduce(sum, sinks.subspan(sum.size()), "gradient of the sink summed");
    s.memory->copy(gradients.dsink.data, sum.data(), sum.size_bytes());
  });
}

}  // namespace heddle::distributed
