// The GPU's candidates for attention. In a build without CUDA they are there and refuse (src/stubs/cuda.cc).
#pragma once

#include "problem/candidate.h"

namespace heddle::cuda {

extern const AttentionForwardKernel kSm80AttentionForward;  // "sm80": mma.sync, every option, for Ampere and later
// "sm80_int8": the same with Q K^T in 8 bits, under Precision::int8_qk alone.
extern const AttentionForwardKernel kSm80AttentionForwardInt8;
extern const AttentionForwardKernel kSm80AttentionDecode;   // "sm80_decode": few rows, keys split, for Ampere and later
extern const AttentionForwardKernel kSm90AttentionForward;  // "sm90": wgmma and TMA, for Hopper
extern const AttentionForwardKernel kSm90AttentionForwardFp8;  // "sm90_fp8": the same with q, k and v in e4m3
extern const AttentionForwardKernel kSm90AttentionDecode;      // "sm90_decode": few rows, keys split, for Hopper

extern const AttentionBackwardKernel kSm80AttentionBackward;  // "sm80": mma.sync, every option, for Ampere and later
extern const AttentionBackwardKernel kSm90AttentionBackward;  // "sm90": wgmma and TMA, for Hopper

// Run when they are asked for, on Ampere and later; every dtype and option.
extern const AttentionForwardKernel kNaiveAttentionForward;     // "naive_cuda": the four steps in their plain form
extern const AttentionForwardKernel kAttentionForwardBaseline;  // "baseline_cuda": the full score matrix

}  // namespace heddle::cuda
