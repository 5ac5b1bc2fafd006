// What a launch tells the kernels.
#pragma once

#include "cuda/any/attention_int8_qk/layout.h"
#include "cuda/common/divisor.h"

namespace heddle::cuda::any::attention_int8_qk {

constexpr int kBlockRows = 64;  // of q, which one CTA quantises

struct Params {
  AttentionProblem problem;
  Codes codes;
  Divisor heads, kv_heads, group;       // H, Hkv, G
  Divisor blocks, row_blocks;           // of the longest sequence's keys and rows
  unsigned key_launches, row_launches;  // blocks of all sequences and heads
};

}  // namespace heddle::cuda::any::attention_int8_qk
