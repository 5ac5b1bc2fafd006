// The instantiations of the kernel, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/attention_fwd_fp8/params.h"
#include "heddle/tensor.h"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

// One instantiation: its tiles, and how to start it.
struct Variant {
  int head_size, value_size;  // the largest it takes
  int consumers, tile_k;
  void (*launch)(const Params& params, int grid, cudaStream_t stream);
};

// Defined one file each in inst/; named after the output. Tokens: scales of k and v by token.
extern const Variant kBf16D64, kBf16D96, kBf16D128;
extern const Variant kF16D64, kF16D96, kF16D128;
extern const Variant kBf16D64Tokens, kBf16D128Tokens;
extern const Variant kF16D64Tokens, kF16D128Tokens;

}  // namespace heddle::cuda::sm90::attention_fwd_fp8
