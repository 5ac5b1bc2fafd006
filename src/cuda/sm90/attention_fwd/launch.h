// The instantiations of the kernel, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/attention_fwd/params.h"
#include "heddle/tensor.h"

namespace heddle::cuda::sm90::attention_fwd {

// One instantiation: its tiles, and how to start it.
struct Variant {
  DType dtype;
  int head_size, value_size;  // the largest it takes
  int consumers, tile_k;
  void (*launch)(const Params& params, int grid, cudaStream_t stream);
};

// Defined one file each in inst/. "Options": with score options (softcap, ALiBi, bias, mask, any scale).
extern const Variant kBf16D64, kBf16D64Wide, kBf16D96, kBf16D128, kBf16D192, kBf16D256;
extern const Variant kBf16D64Options, kBf16D128Options, kBf16D256Options;
extern const Variant kF16D64, kF16D64Wide, kF16D96, kF16D128, kF16D192, kF16D256;
extern const Variant kF16D64Options, kF16D128Options, kF16D256Options;

}  // namespace heddle::cuda::sm90::attention_fwd
