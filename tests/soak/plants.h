// Faults and delays to plant, where the kernels were built for it, and who must find them.
#pragma once

#include <vector>

#include "cuda/common/plants.h"

namespace heddle::soak {

// From now on, in every kernel that was built with HEDDLE_PLANTED.
void plant(cuda::Plant what);
// Whether there are any.
bool can_plant();

// A fault that the soak of a case must find. plant: none where the kernel has it for good.
struct Proof {
  const char* what;
  cuda::Plant plant;
  const char* name;  // of the case
};
const std::vector<Proof>& proofs();

}  // namespace heddle::soak
