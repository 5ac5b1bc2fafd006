// Products of few columns, which only linear layers take.
#pragma once

#include "cuda/common/wgmma.cuh"

namespace heddle::cuda {

HEDDLE_WGMMA_16BIT(32, 1, 16, 17, 18, 19, 20, 21, 22)

}  // namespace heddle::cuda
