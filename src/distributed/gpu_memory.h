// A GPU's memory; without CUDA it cannot be had.
#pragma once

#include <memory>

#include "distributed/memory.h"

namespace heddle::distributed {

// Of the current GPU. Throws RuntimeError.
std::unique_ptr<Memory> gpu_memory();

}  // namespace heddle::distributed
