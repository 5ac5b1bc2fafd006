// The end of a tile: O normalised, rounded and written from the registers.
#pragma once

#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/sm90/attention/rows.cuh"
#include "cuda/sm90/attention_fwd_fp8/config.h"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

using attention::ThreadRows;

// V^T's order of dims has left four neighbours to a thread, so that a quad writes 32 bytes of a row.
template <class C>
__device__ void store_rows(const Params& p, const Work& w, const ThreadRows& rows, const float* o,
                           const float (&factor)[2]) {
  using T = typename C::Output;
  const int column = 4 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int position = rows.position(p, r);
    if (rows.lane_row + 8 * r >= p.positions * p.pack || position >= w.rows) continue;
    T* const to = static_cast<T*>(p.o) + w.sequence * p.o_stride_b + (w.q_row + position) * p.o_stride_s +
                  rows.head(p, w, r) * p.o_stride_h + column;
#pragma unroll
    for (int block = 0; block < C::kValueSize / 16; ++block) {
      const float* d = o + 8 * block + 2 * r;
      if (16 * block + column < p.Dv) {
        *reinterpret_cast<uint2*>(to + 16 * block) = make_uint2(ptx::pack2<T>(d[0] * factor[r], d[4] * factor[r]),
                                                                ptx::pack2<T>(d[1] * factor[r], d[5] * factor[r]));
      }
    }
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd_fp8
