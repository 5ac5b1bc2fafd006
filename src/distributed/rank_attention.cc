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
    s.run->forward(call);
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
    const std::span<float> of_keys = s.run->backward(call, {d_o, d_lse, gradients.dq}, dkv);
    const KeyBlock block = call.gradients();
    if (gradients.dk.given()) s.memory->copy_rows(block.k(of_keys.data(), rows), gradients.dk, rows);
    if (gradients.dv.given()) s.memory->copy_rows(block.v(of_keys.data(), rows), gradients.dv, rows);
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
