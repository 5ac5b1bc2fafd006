// Q and K in 8 bits, as a kernel that multiplies them so finds them in its workspace.
//
// A row of q has one scale. Of K, each channel's mean is taken off first: it adds the same to all scores of a row,
// which softmax does not see, and a large one would leave few of the 8 bits to what differs. Any number near the mean
// will do, so 256 keys at most are asked for it. Then keys in blocks of 64, counted from the sequence's first, have
// four scales: key j that of group j / 2 % 4. These are the columns of a lane in the accumulators of mma.sync, so that
// a scale is one number for each lane, row and block.
#pragma once

#include "problem/attention.h"

namespace heddle::cuda::any::attention_int8_qk {

constexpr int kBlockKeys = 64, kGroups = 4, kGroupKeys = kBlockKeys / kGroups;
constexpr int kLargestCode = 127;
constexpr int kSampledKeys = 256;  // for the mean

struct KeyGroup {
  float scale;
  // Bit 2 n + c: key 8 n + 2 group + c of the block has an element that is not finite. Its codes are 0, and no scale
  // or mean comes from it: rows that do not attend it are as if it were not there.
  std::uint32_t bad;
};

// Rows of codes lie head by head, those of a packed tensor as one batch. Rows and keys beyond those in use hold
// nothing.
struct Codes {
  Operand q, k;         // int8 [batch, head, row, pitch]; strides in bytes; zeros from D on
  Scales q_scale;       // f32 [batch, head, row]: largest |q| / 127 * scale * log2(e); NaN: the row is not finite
  Scales q_shift;       // f32 [batch, head, row]: q . mean * scale * log2(e), what each of the row's scores lacks
  KeyGroup* groups;     // [B, Hkv, blocks, 4]
  std::int64_t blocks;  // of the longest sequence
  std::int64_t pitch;   // bytes of a row: 64 or 128
  float* means;         // [B, Hkv, pitch]
  float scale_log2;     // scale * log2(e)
};

// The n-th key that the mean is taken over: one of each of 256 equal parts of the sequence. Its place inside the part
// moves on by 40503 / 65536 of it, near the golden ratio, so that it does not fall in step with what repeats in the
// data, such as rows of pictures.
constexpr std::int64_t sampled_key(std::int64_t n, std::int64_t keys) {
  return keys <= kSampledKeys ? n : ((n << 16) + (n * 40503 & 65535)) * keys >> 24;
}

// How many keys of a sequence are quantised. A sequence with more than Sk keys, which the caller's bound rules out, is
// cut off there: the workspace has no room for more.
constexpr std::int64_t keys_of(const AttentionProblem& p, const Sequence& s) { return s.sk < p.Sk ? s.sk : p.Sk; }

}  // namespace heddle::cuda::any::attention_int8_qk
