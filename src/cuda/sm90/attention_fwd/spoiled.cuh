// Which tiles are computed again (docs/glossary.md: careful).
#pragma once

#include "cuda/common/attention/rows.cuh"
#include "cuda/sm90/attention_fwd/softmax.cuh"
#include "cuda/sm90/attention_fwd/terms.cuh"

namespace heddle::cuda::sm90::attention_fwd {

// Two things spoil a tile:
// - O is NaN. A value that is not finite has reached P V, perhaps one whose pairs a bias or mask removed; the guard
// then
//   finds out which values nobody attends, and clears them.
// - A row's largest logit is so large that float32 cannot say how far other logits are below it (kLargeLogit), or that
//   the terms of the product cannot hold its bias. The careful softmax subtracts logits before it scales them.
template <class C>
__device__ __forceinline__ bool is_spoiled(const Params& p, const float (&o)[C::kValueSize / 2], const RowState& rows) {
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < C::kValueSize / 2; ++i) sums[i % 4] += o[i];
  const float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  bool spoiled = sum != sum;
  float limit = kLargeLogit;
  if (C::kHasKeyTerms && p.bias.access == PlaneAccess::keys) {
    limit = fminf(limit, 0.25f * Parts<typename C::Element>::kLargest * p.scale);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) spoiled |= fabsf(rows.max[r]) >= limit && rows.max[r] != -INFINITY;
  return spoiled;
}

}  // namespace heddle::cuda::sm90::attention_fwd
