// What becomes of sums and partial results: those of a block's items are added up, dK and dV rounded and written, and a
// row's dQ joined in the order of its list's slots.
#pragma once

#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/sm80/sparse_bwd/params.h"

namespace heddle::cuda::sm80::sparse_bwd {

constexpr int kFinishThreads = 256, kAddingBlocks = 8;

// Of a block, whose sums kAddingBlocks CTAs of kThreads share: what its items after the first one have, in their order.
template <int kThreads>
__device__ __forceinline__ void add_items(const Params& p, std::int64_t floats, std::int64_t number, int share,
                                          int thread) {
  const int count = p.counts[number];
  if (count <= p.pairs_of_item) return;
  const int begin = p.begins[number], items = (count + p.pairs_of_item - 1) / p.pairs_of_item;
  float4* const sums = reinterpret_cast<float4*>(p.sums + number * floats);
#pragma unroll 1
  for (int n = share * kThreads + thread; n < floats / 4; n += kAddingBlocks * kThreads) {
    float4 x = sums[n];
#pragma unroll 4
    for (int item = 1; item < items; ++item) {
      const int first = begin + item * p.pairs_of_item;
      const float4 y = reinterpret_cast<const float4*>(p.others + first / p.pairs_of_item * floats)[n];
      x = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
    }
    sums[n] = x;
  }
}
static __global__ void __launch_bounds__(kFinishThreads)
    add_items_kernel(const __grid_constant__ Params p, std::int64_t floats) {
  add_items<kFinishThreads>(p, floats, blockIdx.x / kAddingBlocks, static_cast<int>(blockIdx.x % kAddingBlocks),
                            static_cast<int>(threadIdx.x));
}

template <class T>
__device__ inline void store_two(std::byte* row, std::int64_t d, std::int64_t stride, bool pairs, float x, float y) {
  T* const to = reinterpret_cast<T*>(row) + d * stride;
  if (pairs) {
    *reinterpret_cast<std::uint32_t*>(to) = ptx::pack2<T>(x, y);
  } else {
    to[0] = static_cast<T>(x);
    to[stride] = static_cast<T>(y);
  }
}

// A CTA a tile of keys, of every block that a sequence of the longest length would have.
template <class T, int kHead>
__global__ void __launch_bounds__(kFinishThreads) finish_keys_kernel(const __grid_constant__ Params p, int blocks) {
  const SparseProblem& problem = p.problem;
  const int unit = static_cast<int>(blockIdx.x) / p.subs, sub = static_cast<int>(blockIdx.x) - unit * p.subs;
  const int head = unit / blocks, block = unit - head * blocks, heads = static_cast<int>(problem.Hkv);
  const int b = head / heads, kv_head = head - b * heads;
  const Sequence s = problem.sequence(b);
  const int first = static_cast<int>(block * problem.lists.block_size) + sub * kTileKeys;
  const int rows = static_cast<int>(clamped(s.k_rows - first, 0, p.tile_keys));
  if (rows == 0) return;
  const std::int64_t number = kv_head * p.blocks + p.first_block(b, s) + block;
  const int fragments = p.tile_keys / 16 * (kHead / 8);
  const float* const tile = p.sums + (number * p.subs + sub) * 2 * fragments * 128;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x) / kWarp; n < 2 * fragments; n += kFinishThreads / kWarp) {
    const bool value = n >= fragments;
    const Operand& to = value ? p.dv : p.dk;
    const int fragment = value ? n - fragments : n, column = fragment % (kHead / 8) * 8 + lane % 4 * 2;
    if (to.data == nullptr || column >= (value ? problem.Dv : problem.D)) continue;  // sizes are multiples of 8
    const float4 x = reinterpret_cast<const float4*>(tile + n * 128)[lane];
    const float scale = value ? 1.0f : problem.scale;
    const int row = fragment / (kHead / 8) * 16 + lane / 4;
    const auto at = [&](int r) { return to.at(b, s.k_begin + first + r, kv_head); };
    if (row < rows) store_two<T>(at(row), column, to.stride_d, p.key_pairs, x.x * scale, x.y * scale);
    if (row + 8 < rows) store_two<T>(at(row + 8), column, to.stride_d, p.key_pairs, x.z * scale, x.w * scale);
  }
}

// Row `within` of a list, of which kHead / 8 lanes have a piece each, as store_dq() writes them. slots: of the list,
// which have a partial result each for the tiles of a block's keys; place(part), says(slot): where one is, and whether.
template <class T, int kHead, class Place, class Says>
__device__ __forceinline__ void join_parts(const Params& p, std::int64_t list, std::int64_t unit, std::int64_t within,
                                           int lane, int slots, Place place_of, Says says_slot) {
  constexpr int kBatch = 4;
  const SparseProblem& problem = p.problem;
  const sparse::Index::Place w = p.place(list);
  const std::int64_t i = w.row + within / p.group, h = unit * p.group + within % p.group;
  if (!w.there || i >= w.s.q_rows) return;
  const int parts = i < w.s.sq ? slots * p.subs : 0;
  float dq[8] = {};
#pragma unroll 1
  for (int first = 0; first < parts; first += kBatch) {
    uint4 piece[kBatch];
    float scale[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int part = first + n, slot = p.subs == 1 ? part : part / p.subs;
      const bool says = part < parts && says_slot(slot);
      const std::int64_t place = place_of(part);
      piece[n] = says ? reinterpret_cast<const uint4*>(p.partial + place * kHead)[lane] : make_uint4(0, 0, 0, 0);
      scale[n] = says ? p.scales[place * (kHead / 32) + lane / 4] : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const std::uint32_t words[4] = {piece[n].x, piece[n].y, piece[n].z, piece[n].w};
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float2 two = ptx::unpack2<__half>(words[t]);
        dq[2 * t] = fmaf(scale[n], two.x, dq[2 * t]);
        dq[2 * t + 1] = fmaf(scale[n], two.y, dq[2 * t + 1]);
      }
    }
  }
  std::byte* const out = p.dq.at(w.b, w.s.q_begin + i, h);
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int d = lane / 4 * 32 + 8 * t + 2 * (lane % 4);
    if (d >= problem.D) continue;  // D is a multiple of 8
    store_two<T>(out, d, p.dq.stride_d, p.dq_pairs, dq[2 * t] * problem.scale, dq[2 * t + 1] * problem.scale);
  }
}

template <class T, int kHead>
__global__ void __launch_bounds__(kFinishThreads) join_dq_kernel(const __grid_constant__ Params p) {
  constexpr int kLanes = kHead / 8;
  const std::int64_t row = (std::int64_t{blockIdx.x} * kFinishThreads + threadIdx.x) / kLanes;
  const std::int64_t at = row / p.rows, within = row - at * p.rows;
  if (at >= p.count * p.units) return;
  join_parts<T, kHead>(
      p, p.first + at / p.units, at % p.units, within, static_cast<int>(threadIdx.x) % kLanes, p.slots,
      [&](int part) { return (at * p.slots * p.subs + part) * p.rows + within; },
      [&](int slot) { return p.place_of[at * p.slots + slot] >= 0; });
}

}  // namespace heddle::cuda::sm80::sparse_bwd
