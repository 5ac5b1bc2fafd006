// Sizes that the kernels and the cut of a call share, for host and device.
#pragma once

namespace heddle::cuda::sm80::attention_decode {

constexpr int kRows = 16;      // packed query rows of a tile: the M of mma.m16n8k16
constexpr int kStepKeys = 16;  // that a warp takes at a time: its K in P V
constexpr int kCellKeys = 64;  // what keys are dealt out in
// With batch_invariant the keys of a sequence are cut into this many, or into at most kMaxChunks longer ones.
constexpr int kChunkKeys = 512, kMaxChunks = 64;

}  // namespace heddle::cuda::sm80::attention_decode
