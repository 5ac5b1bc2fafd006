// Elements of the problem's tensors, on the device.
#pragma once

#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/sm90/attention_decode/config.h"
#include "problem/attention.h"

namespace heddle::cuda::sm90::attention_decode {

__device__ inline float load_value(const std::byte* data, DType dtype, std::int64_t n) {
  switch (dtype) {
    case DType::bf16:
      return static_cast<float>(reinterpret_cast<const __nv_bfloat16*>(data)[n]);
    case DType::f16:
      return static_cast<float>(reinterpret_cast<const __half*>(data)[n]);
    case DType::f8e4m3:
      return ptx::unpack2<__half>(ptx::e4m3x2_to_f16x2(reinterpret_cast<const std::uint8_t*>(data)[n])).x;
    default:
      return reinterpret_cast<const float*>(data)[n];
  }
}

// Row `row` of a unit, counted over its kv heads: which query row that is.
struct QueryRow {
  int kv_head, i, h;
  __device__ QueryRow(const Params& p, const Piece& piece, int row) {
    const int in_unit = p.plan.by_rows.quotient(row), r = piece.row + row - in_unit * p.plan.rows;
    const int group = static_cast<int>(p.problem.G);
    kv_head = piece.head + in_unit;
    i = p.plan.by_group.quotient(r);
    h = kv_head * group + r - i * group;
  }
  __device__ const std::byte* address(const Params& p, const Piece& piece) const {
    return p.problem.q.at(piece.sequence, piece.q_begin + i, h);
  }
};

__device__ inline float load_value(const Plane& x, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  return load_value(x.data, x.dtype, x.offset(b, h, i, j));
}

__device__ inline bool load_flag(const Plane& x, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  return x.data[x.offset(b, h, i, j)] != std::byte{0};
}

}  // namespace heddle::cuda::sm90::attention_decode
