// What a call of a rank's share is made of, checked and put into words that all ranks must share.
#pragma once

#include "distributed/agreement.h"
#include "distributed/views.h"

namespace heddle::distributed {

inline constexpr const char* kForward = "distributed.forward";
inline constexpr const char* kBackward = "distributed.backward";

inline bool heads_move(Scheme scheme) { return scheme == Scheme::ulysses || scheme == Scheme::two_dimensional; }

struct Call {
  const TensorView &q, &k, &v, &o, &lse;
  const Options& options;
  const Runtime& runtime;
  KeyBlock keys;  // of q's dtype
  std::int64_t batch() const { return q.shape[0]; }
  std::int64_t heads() const { return q.shape[2]; }
  KeyBlock gradients() const {
    return {keys.batch, keys.heads, keys.head_size, keys.head_size_v, DType::f32, keys.device};
  }
};

// Throws Error. The result refers to the arguments.
Call checked_call(const char* operation, const Plan& plan, Scheme scheme, const Communicator& communicator,
                  const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                  const TensorView& lse, const Options& options, const Runtime& runtime);
// What a backward has besides. Throws Error.
void check_backward(const Call& call, const Plan& plan, Scheme scheme, const TensorView& d_o, const TensorView& d_lse,
                    const Gradients& gradients);
// across: between groups, where heads move. gradients: of a backward, else null.
std::vector<Agreement::Word> words_of(const Call& call, const Plan& plan, Scheme scheme, Scheme across,
                                      const Gradients* gradients);

}  // namespace heddle::distributed
