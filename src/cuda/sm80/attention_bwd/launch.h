// The instantiations of the kernels, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm80/attention_bwd/params.h"

namespace heddle::cuda::sm80::attention_bwd {

// One tiling: its tiles, and how to start its kernels.
struct Variant {
  int tile_q, tile_k, head_size;
  std::size_t shared_bytes;
  void (*launch)(const Params& params, cudaStream_t stream);            // dk, dv and the sums of dq
  void (*launch_finish_dq)(const Params& params, cudaStream_t stream);  // dq
};

// All of one dtype and head size.
struct Variants {
  Variant large;       // none of the score options; may need the shared memory of Hopper
  Variant plain;       // the same; may need more shared memory than Ada has
  Variant options;     // everything, and may need as much
  Variant everywhere;  // everything
  void (*launch_dbias)(const Params& params, cudaStream_t stream);  // by the tiles of `everywhere`
};

// Defined one file each in inst/, by the largest head size they take.
extern const Variants kBf16D64, kBf16D128, kBf16D256;
extern const Variants kF16D64, kF16D128, kF16D256;
extern const Variants kF32D64, kF32D128, kF32D256;     // three tf32 products
extern const Variants kTf32D64, kTf32D128, kTf32D256;  // one

}  // namespace heddle::cuda::sm80::attention_bwd
