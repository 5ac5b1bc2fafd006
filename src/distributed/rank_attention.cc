// A rank's share: arguments checked and compared, the scheme run, the gradient of the sink summed.
#include <cstring>

#include "distributed/memory.h"
#include "distributed/scheme.h"

namespace heddle::distributed {

struct RankAttention::State {
  State(const Plan& plan, Communicator& communicator, Scheme scheme)
      : plan(plan),
        communicator(communicator),
        scheme(scheme == Scheme::automatic ? plan.chosen() : scheme),
        across(this->scheme == Scheme::two_dimensional ? plan.across() : Scheme::gather),
        agreement(communicator),
        run(heads_move(this->scheme) ? scheme_of_heads(plan, communicator, this->scheme, across)
                                     : scheme_of_keys(plan, communicator, this->scheme)) {}

  const Plan& plan;
  Communicator& communicator;
  const Scheme scheme, across;
  Agreement agreement;
  const std::unique_ptr<SchemeOfRank> run;
  WorkspaceBuffer workspace;
  Floats sinks;
};

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
  const Call call = checked_call(kForward, s.plan, s.scheme, s.communicator.rank(), q, k, v, o, lse, options, runtime);
  s.agreement.require(words_of(call, s.plan, s.scheme, s.across, nullptr));
  s.run->forward(call);
}

void RankAttention::backward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                             const TensorView& lse, const TensorView& d_o, const TensorView& d_lse,
                             const Gradients& gradients, const Options& options, const Runtime& runtime) {
  State& s = *state_;
  const int rank = s.communicator.rank();
  const Call call = checked_call(kBackward, s.plan, s.scheme, rank, q, k, v, o, lse, options, runtime);
  check_backward(call, d_o, d_lse, gradients);
  const bool dkv = gradients.dk.given() || gradients.dv.given();
  s.agreement.require(words_of(call, s.plan, s.scheme, s.across, &gradients));

  const std::int64_t rows = s.plan.rows(rank);
  const std::span<float> of_keys = s.run->backward(call, {d_o, d_lse, gradients.dq}, dkv);
  const KeyBlock block = call.gradients();
  if (gradients.dk.given()) copy_rows({block.k(of_keys.data(), rows)}, {gradients.dk}, rows);
  if (gradients.dv.given()) copy_rows({block.v(of_keys.data(), rows)}, {gradients.dv}, rows);
  if (!gradients.dsink.given()) return;
  std::memset(gradients.dsink.data, 0, static_cast<std::size_t>(q.shape[2]) * sizeof(float));
  if (rows > 0 && q.shape[0] > 0) {
    Calls(options, runtime, s.workspace).sink_gradient({q, o, lse}, {d_o, d_lse, {}}, k, v, gradients.dsink);
  }
  s.communicator.all_reduce({static_cast<float*>(gradients.dsink.data), static_cast<std::size_t>(q.shape[2])},
                            s.sinks.get(s.communicator.size() * q.shape[2]), "gradient of the sink summed");
}

}  // namespace heddle::distributed
