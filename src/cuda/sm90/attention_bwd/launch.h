// The instantiations of the kernels, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/attention_bwd/params.h"

namespace heddle::cuda::sm90::attention_bwd {

// One instantiation: its tiles, and how to start it.
struct Variant {
  int columns;  // of its sums: the largest head size that it takes, or a little more
  int tile_q, tile_k;
  void (*launch)(const Params& params, int grid, cudaStream_t stream);
  void (*round)(const Params& params, const Sums& sums, cudaStream_t stream);  // after that, on the same stream
};

// Defined one file each in inst/. "Planes": ALiBi, bias, mask.
extern const Variant kBf16D64, kBf16D96, kBf16D128, kBf16D192, kBf16D256;
extern const Variant kF16D64, kF16D96, kF16D128, kF16D192, kF16D256;
extern const Variant kBf16D64Softcap, kBf16D128Softcap, kBf16D256Softcap, kF16D64Softcap, kF16D128Softcap,
    kF16D256Softcap;
extern const Variant kBf16D64Planes, kBf16D128Planes, kBf16D256Planes, kF16D64Planes, kF16D128Planes, kF16D256Planes;

}  // namespace heddle::cuda::sm90::attention_bwd
