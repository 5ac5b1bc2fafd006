// The GPU's candidates for attention. In a build without CUDA they are there and refuse (src/stubs/cuda.cc).
#pragma once

#include "core/candidate.h"

namespace heddle::cuda {

extern const AttentionForwardKernel kSm80AttentionForward;  // "sm80": mma.sync, every option, for Ampere and later
extern const AttentionForwardKernel kSm90AttentionForward;  // "sm90": wgmma and TMA, for Hopper
extern const AttentionForwardKernel kSm90AttentionDecode;   // "sm90_decode": few rows, keys split, for Hopper

}  // namespace heddle::cuda
