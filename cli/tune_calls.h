// The calls that `heddle tune` times: of the examples that candidates' lines of costs bring, and of small ones.
#pragma once

#include <string>

#include "problem/attention.h"
#include "problem/linear.h"

namespace heddle::cli {

struct TunedCall {
  std::string refusal;               // not empty: the candidate does not run here
  double seconds = 0, estimate = 0;  // of one call, measured and as the costs in force have it
};

// What a call does: operations of products, and bytes of keys and values, or of weights.
struct CallWork {
  double flops = 0, bytes = 0;
};

// Times one call of the candidate of that name on the current GPU.
TunedCall timed(const char* candidate, const AttentionExample& call, Pass pass);
TunedCall timed(const char* candidate, const LinearExample& call, Pass pass);

CallWork work_of(const AttentionExample& call, Pass pass);
CallWork work_of(const LinearExample& call, Pass pass);

// With next to nothing to compute. Decoding few keys still shows what splitting and merging them costs.
AttentionExample small_of(AttentionExample call);
LinearExample small_of(LinearExample call);

}  // namespace heddle::cli
