// The instantiations of the kernels, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/attention_bwd/params.h"

namespace heddle::cuda::sm90::attention_bwd {

// One instantiation: its tiles, and how to start it.
struct Variant {
  int head_size;  // the largest that it takes
  int tile_q, tile_k;
  void (*launch)(const Params& params, int grid, cudaStream_t stream);
  void (*launch_dq)(const Params& params, cudaStream_t stream);  // after that, on the same stream
};

// Defined one file each in inst/.
extern const Variant kBf16D64, kBf16D128, kBf16D192, kBf16D256;
extern const Variant kF16D64, kF16D128, kF16D192, kF16D256;

}  // namespace heddle::cuda::sm90::attention_bwd
