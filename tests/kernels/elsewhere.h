// What a GPU's candidate says of tensors on the CPU, in this build.
#pragma once

#include <string>

#include "cuda/backend.h"

namespace heddle {

inline std::string refusal_of_cpu_tensors() {
  return cuda::built() ? "it runs on another device than the tensors are on"
                       : "this heddle was built without CUDA: build it with HEDDLE_CUDA=ON";
}

}  // namespace heddle
