#include "ops/choice.h"

#include <cstdint>

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

void check_workspace(const Check& check, const Workspace& workspace, std::size_t needed) {
  check.require(workspace.bytes >= needed && (needed == 0 || workspace.data != nullptr), "the workspace has ",
                workspace.bytes, " bytes: this call needs ", needed, "; ask the operation's workspace query");
  check.require(reinterpret_cast<std::uintptr_t>(workspace.data) % 64 == 0,
                "the workspace must be aligned to 64 bytes");
}

}  // namespace heddle
