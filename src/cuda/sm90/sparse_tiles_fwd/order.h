// In which order the tiles of lists come.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/attention_fwd/variants.h"

namespace heddle::cuda::sm90::sparse_tiles_fwd {

// Writes the numbers of all tiles to `order`: sections of heads as they follow each other, since their keys stay in the
// L2 cache, and in each the longest lists first, so that no CTA ends alone with one. Of equal lengths.
void launch_order(const attention_fwd::Params& params, int* order, cudaStream_t stream);

}  // namespace heddle::cuda::sm90::sparse_tiles_fwd
