// Rows of a tensor on their way to a tile in shared memory. Rows outside [begin, end) and columns from `size` on arrive
// as zeros and are not read: whatever lies there, NaN included, meets no product.
#pragma once

#include <type_traits>

#include "cuda/common/divisor.h"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention/tile.cuh"
#include "problem/attention.h"

namespace heddle::cuda::sm80::attention {

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

// Contiguous; addresses, strides and sizes in multiples of 16 bytes.
struct AlignedRows {
  // make_source(j, bytes): one that stands so far into row j. first: the row that goes to row 0 of the tile.
  template <int kThreads, class T, int kRows, int kColumns, class MakeSource>
  __device__ static void load(Tile<T, kRows, kColumns>& tile, const Operand&, int size, int first, int begin, int end,
                              MakeSource make_source) {
    constexpr unsigned kChunks = tile.kChunks, kPass = kThreads / kChunks;
    const unsigned thread = recomputed_by_tile(threadIdx.x, first), chunk = thread % kChunks, row = thread / kChunks;
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

// Anything.
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

}  // namespace heddle::cuda::sm80::attention
