// The GPU's candidates for attention. In a build without CUDA they are there and refuse (src/stubs/cuda.cc).
#pragma once

#include "core/candidate.h"

namespace heddle::cuda {

extern const AttentionForwardKernel kSm80AttentionForward;  // "sm80": mma.sync, every option, for Ampere and later
extern const AttentionForwardKernel kSm90AttentionForward;  // "sm90": wgmma and TMA, for Hopper
extern const AttentionForwardKernel kSm80AttentionDecode;   // "sm80_decode": few query rows, keys split over the chip

// Run when they are asked for, on Ampere and later; every dtype and option.
extern const AttentionForwardKernel kNaiveAttentionForward;     // "naive_cuda": the four steps in their plain form
extern const AttentionForwardKernel kAttentionForwardBaseline;  // "baseline_cuda": the full score matrix

}  // namespace heddle::cuda
