// The file that `heddle tune` writes and HEDDLE_TUNING names.
#pragma once

#include <string>

#include "cuda/common/cost.h"

namespace heddle::cuda {

// `table` with the costs that the file gives. Throws Error, naming file, line, value and rule, if it is no such file.
CostTable read_tuning(const std::string& path, const CostTable& table);

}  // namespace heddle::cuda
