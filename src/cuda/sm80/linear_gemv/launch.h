// The instantiations of the kernel, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm80/linear_gemv/params.h"

namespace heddle::cuda::sm80::linear_gemv {

struct Variant {
  int slabs, resident, block_columns;
  int fixed_bytes;  // of shared memory
  void (*launch)(const Params& params, std::size_t shared_bytes, cudaStream_t stream);
};

// A source's: for few rows of W, for many.
struct Variants {
  Variant few, many;
};
extern const Variants kBf16E2M1, kF16E2M1;

}  // namespace heddle::cuda::sm80::linear_gemv
