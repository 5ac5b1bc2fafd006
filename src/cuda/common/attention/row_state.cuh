// Statistics of the query rows in the accumulators of a matrix product.
//
// A row of the accumulators of mma.sync and wgmma lies in four neighbouring lanes, a quad; a thread has parts of two
// rows, 8 apart.
#pragma once

#include <cuda_runtime_api.h>

namespace heddle::cuda {

// Of a thread's two rows, over the keys met so far. max is in units of the kernel's logits, after the scale; sum counts
// this thread's columns only.
struct RowState {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};
};

}  // namespace heddle::cuda
