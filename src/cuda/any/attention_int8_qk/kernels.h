// The instantiations, and what a launch tells them.
#pragma once

#include <cuda_runtime_api.h>

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

struct Kernels {
  void (*launch)(const Params& params, cudaStream_t stream);
};

extern const Kernels kBf16D64, kBf16D128, kF16D64, kF16D128;

}  // namespace heddle::cuda::any::attention_int8_qk
