// Tiles of q, k and v on their way to shared memory.
#pragma once

#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention/rows.cuh"
#include "cuda/sm80/attention_fwd/schedule.cuh"

namespace heddle::cuda::sm80::attention_fwd {

using attention::DenseRows;
using attention::PagedRows;

// Scales beside codes: zeros for rows and blocks that do not exist.
template <class C>
__device__ void load_q_scales(const Params& p, const Work& w, SharedMemory<C>& shared) {
  static_assert(C::kTileQ == C::kThreads, "a thread has one row");
  const int i = w.first + static_cast<int>(threadIdx.x);
  const bool exists = i < w.sq;
  const float* from = p.codes.q_scale.place(w.b, w.q_row + (exists ? i : 0), w.h);
  ptx::copy_async_4(ptx::shared_address(&shared.scales.q[threadIdx.x]), from, exists);
}

template <class C>
__device__ void load_k_scales(const Params& p, const TileWork<typename C::Walk>& w, int tile, SharedMemory<C>& shared) {
  using namespace any::attention_int8_qk;
  constexpr int kBlocks = C::kTileK / kBlockKeys, kPerCopy = 16 / sizeof(KeyGroup), kCopies = kGroups / kPerCopy;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread >= kBlocks * kCopies) return;
  const int in_tile = thread / kCopies, group = thread % kCopies * kPerCopy, block = tile * kBlocks + in_tile;
  const bool exists = block * kBlockKeys < w.walk.keys().end;
  const std::int64_t head = w.b * p.problem.Hkv + p.group.quotient(w.h);
  const KeyGroup* from = p.codes.groups + (exists ? (head * p.codes.blocks + block) * kGroups + group : 0);
  ptx::copy_async_16(ptx::shared_address(&shared.scales.k[in_tile][group]), from, exists);
}

template <class C>
__device__ void load_q(const Params& p, const Work& w, SharedMemory<C>& shared) {
  constexpr std::int64_t kBytes = sizeof(typename C::QkElement);
  const Operand& q = Int8Qk<C> ? p.codes.q : p.problem.q;
  const std::byte* head = q.data + kBytes * (w.b * q.stride_b + w.q_row * q.stride_s + w.h * q.stride_h);
  const auto make_source = [&](int i, unsigned bytes) {
    return DenseRows{head + bytes + i * (kBytes * q.stride_s), kBytes * q.stride_s};
  };
  const int size = Int8Qk<C> ? C::kHeadSize : static_cast<int>(p.problem.D);
  C::Rows::template load<C::kThreads>(shared.q, q, size, w.first, 0, w.sq, make_source);
  if constexpr (Int8Qk<C>) load_q_scales<C>(p, w, shared);
}

// One key tile of k or v. data: as in Work.
template <class C, class T>
__device__ void load_keys(const Params& p, const TileWork<typename C::Walk>& w, const Operand& x, const std::byte* data,
                          std::int64_t size, int tile, Tile<T, C::kTileK, C::kHeadSize>& to) {
  constexpr std::int64_t kBytes = sizeof(T);
  const AttentionProblem& a = p.problem;
  const auto load = [&](auto make_source) {
    C::Rows::template load<C::kThreads>(to, x, static_cast<int>(size), tile * C::kTileK, w.walk.keys().begin,
                                        w.walk.keys().end, make_source);
  };
  if (!Int8Qk<C> && a.page_table.data != nullptr) {
    load([&](int j, unsigned bytes) {
      return PagedRows<T>{data + bytes,
                          x,
                          a.page_table.data + w.b * a.page_table_stride,
                          p.page_size,
                          static_cast<int>(a.k_batches) - 1,
                          static_cast<unsigned>(w.k_slot + j)};
    });
  } else {
    load([&](int j, unsigned bytes) {
      return DenseRows{data + bytes + j * (kBytes * x.stride_s), kBytes * x.stride_s};
    });
  }
}

template <class C>
__device__ void load_k(const Params& p, const TileWork<typename C::Walk>& w, int tile, SharedMemory<C>& shared) {
  if constexpr (Int8Qk<C>) {
    load_keys<C>(p, w, p.codes.k, w.k, C::kHeadSize, tile, shared.k);
    load_k_scales<C>(p, w, tile, shared);
  } else {
    load_keys<C>(p, w, p.problem.k, w.k, p.problem.D, tile, shared.k);
  }
}

template <class C>
__device__ void load_v(const Params& p, const TileWork<typename C::Walk>& w, int tile, SharedMemory<C>& shared) {
  load_keys<C>(p, w, p.problem.v, w.v, p.problem.Dv, tile, shared.v);
}

}  // namespace heddle::cuda::sm80::attention_fwd
