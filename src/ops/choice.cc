#include "ops/choice.h"

#include "ops/attention_choice.h"
#include "ops/linear_choice.h"

namespace heddle {
namespace {

template <class Problem>
bool has_candidate(std::string_view name) {
  return std::ranges::any_of(Operation<Problem>::candidates(),
                             [&](const auto* kernel) { return kernel->name == name; });
}

}  // namespace

bool names_a_kernel(std::string_view name) {
  return has_candidate<AttentionProblem>(name) || has_candidate<AttentionBackwardProblem>(name) ||
         has_candidate<LinearProblem>(name) || has_candidate<LinearBackwardProblem>(name);
}

}  // namespace heddle
