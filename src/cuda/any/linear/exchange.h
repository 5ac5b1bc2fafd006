// Where warps that share a tile's columns add up (gather.cuh).
#pragma once

#include <vector_types.h>

namespace heddle::cuda::linear {

// Sums of the column groups behind the first, on their way to it.
template <class C, bool kNeeded = (C::kColumnGroups > 1)>
struct Exchange {
  float4 sums[C::kRowGroups][C::kColumnGroups - 1][C::kRowBlocks * C::kAccumulators / 4][128];
};
template <class C>
struct Exchange<C, false> {};

}  // namespace heddle::cuda::linear
