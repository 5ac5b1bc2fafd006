// Starts one instantiation.
#pragma once

#include "cuda/common/sparse_fwd/launch.cuh"
#include "cuda/sm80/sparse_fwd/variants.h"

namespace heddle::cuda::sm80::sparse_fwd {

template <DType kType, int kRow>
Variant Instance<kType, kRow>::variant() {
  constexpr Row row = kVariants[kRow];
  return {row, kType, cuda::sparse_fwd::launch<ElementOf<kType>, row.head, false>};
}

}  // namespace heddle::cuda::sm80::sparse_fwd
