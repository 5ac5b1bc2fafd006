// The GPU's candidates for linear layers. In a build without CUDA they are there and refuse (src/stubs/cuda.cc).
#pragma once

#include "core/linear_problem.h"

namespace heddle::cuda {

extern const LinearKernel kSm80Linear;       // "sm80_linear": mma.sync, every format, from Ampere on
extern const LinearKernel kSm90LinearW4A16;  // "sm90_w4a16": wgmma, weights decoded in registers, for Hopper
extern const LinearKernel kSm90LinearW4A8;   // "sm90_w4a8": the same with products in e4m3

}  // namespace heddle::cuda
