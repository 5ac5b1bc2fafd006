#include "ops/choice.h"

#include "ops/operations.h"

namespace heddle {

bool names_a_kernel(std::string_view name) {
  bool found = false;
  AllOperations::each([&]<class Problem>() {
    found = found || std::ranges::any_of(Operation<Problem>::candidates(),
                                         [name](const auto* kernel) { return kernel->name == name; });
  });
  return found;
}

}  // namespace heddle
