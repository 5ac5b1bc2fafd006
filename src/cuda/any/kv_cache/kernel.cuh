// apply_rotary and append_kv_cache on any GPU: a CTA takes the heads of one row after another.
#pragma once

#include "cuda/any/kv_cache/row.cuh"

namespace heddle::cuda::any::kv_cache {

constexpr int kThreads = 256;

// Calls visit(b, i) for the rows of this CTA.
template <class Visit>
__device__ void for_each_row(std::int64_t sequences, std::int64_t rows, Visit visit) {
#pragma unroll 1
  for (std::int64_t row = blockIdx.x; row < sequences * rows; row += gridDim.x) visit(row / rows, row % rows);
}

// Calls visit(head, piece) for what this thread moves of a row.
template <class Visit>
__device__ void for_each_piece(std::int64_t heads, int pieces, Visit visit) {
  const int count = static_cast<int>(heads) * pieces;
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < count; n += kThreads) visit(n / pieces, n % pieces);
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) rotary_kernel(const __grid_constant__ RotaryProblem p) {
  for_each_row(p.B, p.S, [&](std::int64_t b, std::int64_t i) {
    const std::int64_t offset = p.offsets != nullptr ? p.offsets[b] : 0;
    const std::int64_t position = clamped(offset + i, 0, p.rotary.positions - 1);
    for_each_piece(p.H, pieces_of<kWidth>(p.D, p.rotary.dims), [&](int h, int n) {
      move_piece(p.rotary, position, Row<T, kWidth>(p.x, b, i, h), Row<T, kWidth>(p.out, b, i, h), InKind<T>(), n);
    });
  });
}

// MakeKind: how a head of k, or of v, is stored.
template <class T, class MakeKind, int kWidth>
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ AppendProblem p, const __grid_constant__ MakeKind make_kind) {
  using Stored = Row<typename MakeKind::Kind::Element, kWidth>;
  for_each_row(p.B, p.S, [&](std::int64_t b, std::int64_t i) {
    const std::int64_t position = p.seqlens[b] + i;
    if (position < 0 || position >= p.capacity) return;
    const std::int64_t page = p.page(b, position), slot = position % p.page_size;
    if (page < 0 || page >= p.pages) return;
    const std::int64_t turned = clamped(position, 0, p.rotary.positions - 1);
    for_each_piece(p.Hkv, pieces_of<kWidth>(p.D, p.rotary.dims), [&](int h, int n) {
      move_piece(p.rotary, turned, Row<T, kWidth>(p.k_new, b, i, h), Stored(p.k_cache, page, slot, h), make_kind.k(h),
                 n);
    });
    for_each_piece(p.Hkv, pieces_of<kWidth>(p.Dv, 0), [&](int h, int n) {
      move_piece(RotaryTables(), 0, Row<T, kWidth>(p.v_new, b, i, h), Stored(p.v_cache, page, slot, h), make_kind.v(h),
                 n);
    });
  });
}

}  // namespace heddle::cuda::any::kv_cache
