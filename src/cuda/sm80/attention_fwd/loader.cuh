// Rows of q, k and v on their way to shared memory. Rows outside [begin, end) and columns from `size` on arrive as
// zeros and are not read: whatever lies there, NaN included, meets no product.
#pragma once

#include <type_traits>

#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention_fwd/schedule.cuh"

namespace heddle::cuda::sm80::attention_fwd {

// A source names row after row of one head. Rows at a constant distance:
struct DenseRows {
  const std::byte* row;
  std::int64_t stride;  // bytes
  __device__ const std::byte* get(bool) const { return row; }
  __device__ void advance(int rows) { row += rows * stride; }
};

// Keys in pages. data: page 0, slot 0.
template <class T>
struct PagedRows {
  const std::byte* data;
  const Operand& x;
  const std::int32_t* pages;
  const Divisor& page_size;
  int last;  // page
  unsigned slot;
  // The page table is read for rows that exist only.
  __device__ const std::byte* get(bool exists) const {
    if (!exists) return data;
    const unsigned page = page_size.quotient(slot);
    return data + std::int64_t{sizeof(T)} * (std::int64_t{min(max(pages[page], 0), last)} * x.stride_b +
                                             (slot - page * page_size.divisor) * x.stride_s);
  }
  __device__ void advance(int rows) { slot += rows; }
};

struct AlignedRows {
  // make_source(j, bytes): one that stands so far into row j. first: the row that goes to row 0 of the tile.
  template <int kThreads, class T, int kRows, int kColumns, class MakeSource>
  __device__ static void load(Tile<T, kRows, kColumns>& tile, const Operand&, int size, int first, int begin, int end,
                              MakeSource make_source) {
    constexpr unsigned kChunks = tile.kChunks, kPass = kThreads / kChunks;
    const unsigned thread = recomputed(threadIdx.x, first), chunk = thread % kChunks, row = thread / kChunks;
    const std::uint32_t to = ptx::shared_address(&tile) + swizzled(tile.kPitch, row, chunk);
    const unsigned from_begin = first + row - begin;
    const unsigned length = tile.kPerChunk * static_cast<int>(chunk) < size ? end - begin : 0;
    auto source = make_source(first + static_cast<int>(row), 16 * chunk);
#pragma unroll
    for (unsigned i = 0; i < kRows; i += kPass) {
      const bool exists = from_begin + i < length;
      // Row row + i has the swizzle (row ^ i) % 8, as i is a multiple of kPass.
      ptx::copy_async_16((to ^ (i % 8) << 4) + i * tile.kPitch, source.get(exists), exists);
      source.advance(kPass);
    }
  }
};

struct StridedRows {
  template <int kThreads, class T, int kRows, int kColumns, class MakeSource>
  __device__ static void load(Tile<T, kRows, kColumns>& tile, const Operand& x, int size, int first, int begin, int end,
                              MakeSource make_source) {
    using Bits = std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint32_t>;
    constexpr int kPerChunk = tile.kPerChunk, kChunks = tile.kChunks, kPass = kThreads / kChunks;
    const int thread = static_cast<int>(threadIdx.x), chunk = thread % kChunks, row = thread / kChunks;
    auto source = make_source(first + row, 0);
#pragma unroll 1
    for (int i = 0; i < kRows; i += kPass, source.advance(kPass)) {
      Bits element[kPerChunk] = {};
      const int j = first + row + i;
      if (begin <= j && j < end) {
        const auto* from = reinterpret_cast<const Bits*>(source.get(true));
#pragma unroll
        for (int d = 0; d < kPerChunk; ++d) {
          if (kPerChunk * chunk + d < size) element[d] = from[(kPerChunk * chunk + d) * x.stride_d];
        }
      }
      uint4 words;
      if constexpr (sizeof(T) == 2) {
        words.x = element[0] | element[1] << 16;
        words.y = element[2] | element[3] << 16;
        words.z = element[4] | element[5] << 16;
        words.w = element[6] | element[7] << 16;
      } else {
        words = {element[0], element[1], element[2], element[3]};
      }
      *reinterpret_cast<uint4*>(reinterpret_cast<std::byte*>(&tile) + swizzled(tile.kPitch, row + i, chunk)) = words;
    }
  }
};

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
