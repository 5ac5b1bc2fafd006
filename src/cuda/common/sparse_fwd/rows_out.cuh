// A piece of a row's output on its way to memory: eight columns, those 8 t + 2 c and the next, t from 0 to 3, of the 32
// that a quad of lanes has. Piece 4 m + c of a row is that of lane c for columns from 32 m on.
#pragma once

#include <cfloat>

#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/sparse_fwd/params.h"

namespace heddle::cuda::sparse_fwd {

// What halves are relative to: `largest`, or near it. Up to 2^126, whose inverse is no subnormal number.
__device__ __forceinline__ float unit_of(float largest) { return largest >= FLT_MIN ? fminf(largest, 0x1p126f) : 1.0f; }

// o at row i of sequence b and head h.
template <class T>
__device__ __forceinline__ void write_piece(const Params& p, std::int64_t b, const Sequence& s, std::int64_t i,
                                            std::int64_t h, int piece, const float (&o)[8]) {
  const Operand& to = p.problem.o;
  std::byte* const out = to.at(b, s.q_begin + i, h);
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int d = piece / 4 * 32 + 8 * t + 2 * (piece % 4);
    if (d >= p.problem.Dv) continue;  // Dv is a multiple of 8
    if (to.dtype == DType::f32) {
      reinterpret_cast<float*>(out)[d * to.stride_d] = o[2 * t];
      reinterpret_cast<float*>(out)[(d + 1) * to.stride_d] = o[2 * t + 1];
    } else if (p.o_pairs) {
      *reinterpret_cast<std::uint32_t*>(out + 2 * d) = ptx::pack2<T>(o[2 * t], o[2 * t + 1]);
    } else {
      reinterpret_cast<T*>(out)[d * to.stride_d] = static_cast<T>(o[2 * t]);
      reinterpret_cast<T*>(out)[(d + 1) * to.stride_d] = static_cast<T>(o[2 * t + 1]);
    }
  }
}

// o * factor, which is in units, to place `at` among partial results.
template <int kHead>
__device__ __forceinline__ void write_partial(const Params& p, std::int64_t at, int piece, const float (&o)[8],
                                              float factor, float unit) {
  std::uint32_t words[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) words[t] = ptx::pack2<__half>(o[2 * t] * factor, o[2 * t + 1] * factor);
  reinterpret_cast<uint4*>(p.partial + at * kHead)[piece] = make_uint4(words[0], words[1], words[2], words[3]);
  if (piece % 4 == 0) p.scales[at * (kHead / 32) + piece / 4] = unit;
}

__device__ __forceinline__ void write_lse(const Params& p, std::int64_t b, const Sequence& s, std::int64_t i,
                                          std::int64_t h, float lse) {
  const Plane& to = p.problem.lse;
  if (to.data != nullptr) reinterpret_cast<float*>(to.data)[to.offset(b, h, s.q_begin + i)] = lse;
}

// ln of the sink's weight; -inf without one.
__device__ __forceinline__ float sink_of(const Params& p, std::int64_t h) {
  const auto& sink = p.problem.sink;
  return sink.data != nullptr ? reinterpret_cast<const float*>(sink.data)[h * sink.stride_h] : -INFINITY;
}

}  // namespace heddle::cuda::sparse_fwd
