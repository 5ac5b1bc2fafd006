// The calls that `heddle tune` times: of the examples that candidates' lines of costs bring, and of small ones.
#pragma once

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "problem/attention.h"
#include "problem/linear.h"
#include "problem/select_blocks.h"
#include "problem/sparse.h"

namespace heddle::cli {

template <class Problem>
constexpr Pass kPass =
    std::is_same_v<Problem, AttentionBackwardProblem> || std::is_same_v<Problem, SparseBackwardProblem> ||
            std::is_same_v<Problem, LinearBackwardProblem>
        ? Pass::backward
        : Pass::forward;

// A call on the current GPU, of tensors drawn at random.
struct PreparedCall {
  std::function<std::vector<Candidate>()> explain;
  std::function<double()> measure;  // seconds of one call
};
PreparedCall prepared(const char* candidate, const AttentionExample& call, Pass pass);
PreparedCall prepared(const char* candidate, const SparseExample& call, Pass pass);
PreparedCall prepared(const char* candidate, const SelectExample& call, Pass pass);
PreparedCall prepared(const char* candidate, const LinearExample& call, Pass pass);

// By the candidate of that name.
template <class Problem>
class ExampleCall {
 public:
  ExampleCall(const char* candidate, const typename Problem::Example& call)
      : candidate_(candidate), call_(prepared(candidate, call, kPass<Problem>)) {}

  std::string refusal() const { return told().reason; }  // empty if it takes the call
  double estimate() const { return told().seconds; }     // as costs are now
  double measure() const { return call_.measure(); }

 private:
  Candidate told() const {
    for (const Candidate& each : call_.explain()) {
      if (each.name == candidate_) return each;
    }
    return {};
  }

  std::string candidate_;
  PreparedCall call_;
};

// With next to nothing to compute. Decoding few keys still shows what splitting and merging them costs; lists are more
// than those of a step of decoding, which goes by rows whatever its example goes by.
AttentionExample small_of(AttentionExample call);
SparseExample small_of(SparseExample call);
SelectExample small_of(SelectExample call);
LinearExample small_of(LinearExample call);

}  // namespace heddle::cli
