// A CTA's shared memory, and rows on their way into it.
#pragma once

#include <type_traits>

#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/sparse/best_blocks.cuh"
#include "cuda/sm90/nsa_step/params.h"

namespace heddle::cuda::sm90::nsa_step {

constexpr unsigned kAll = 0xffffffff;

using sparse::Key;

// Rows of 16-byte chunks; chunk c of row r lies at c ^ (r % 8), so that eight rows of one column meet all banks.
template <int kHead>
struct alignas(128) Tile {
  static constexpr std::uint32_t kRowBytes = kHead * 2;
  static constexpr int kChunks = kHead / 8;
  std::byte bytes[kTileKeys * kRowBytes];

  __device__ static std::uint32_t offset(unsigned row, unsigned chunk) {
    return row * kRowBytes + ((chunk ^ row % 8) << 4);
  }
};

template <int kHead>
struct SharedMemory {
  static constexpr int kStages = 3 * kMostHead / kHead;  // of a warp: two are on their way while one is met
  static constexpr int kPitch = kHead + 8;               // floats: eight rows of a column meet all banks
  struct Stage {
    Tile<kHead> k, v;
  };
  Stage ring[kWarps][kStages];
  float4 partial[kBranches][kRows * kPitch / 4];  // the CTA's O of each branch, [kRows][kPitch]
  Tile<kHead> q;
  uint4 new_key[2][Tile<kHead>::kChunks];        // the step's own key and value
  uint4 new_pooled[2][Tile<kHead>::kChunks];     // and the means of the block that it ends
  Key lists[kWarps][kWarp];                      // the best blocks of each warp, then of each CTA of the cluster
  Key best[kMostSlots];                          // of this CTA, the best first
  float top[kWarps][kRows], sum[kWarps][kRows];  // of each warp
  float2 statistics[kBranches][kRows];           // of the CTA: the largest score, in log2 units, and the sum
  float lse[kRows];                              // of the compressed branch, log2
  float gate[kBranches][kRows];
  int list[kMostSlots];  // the chosen blocks, -1 behind the last

  // O of a warp, as fragments have it: [columns / 8][lane]. It lies where the warp's first stage lay.
  __device__ float4* warp_o(int warp) { return reinterpret_cast<float4*>(&ring[warp][0]); }
  __device__ float* partial_row(int branch, int row) {
    return reinterpret_cast<float*>(&partial[branch][0]) + row * kPitch;
  }
};
static_assert(sizeof(SharedMemory<128>) <= 227 * 1024 && sizeof(SharedMemory<64>) <= 227 * 1024);
static_assert(sizeof(SharedMemory<128>::Stage) == kRows * 128 * sizeof(float));
static_assert(sizeof(SharedMemory<64>::Stage) == kRows * 64 * sizeof(float));

// Chunk `chunk` of a row of `size` elements, zeros behind its end.
__device__ inline uint4 load_chunk(const std::byte* row, std::int64_t stride_d, int chunk, std::int64_t size,
                                   bool wide) {
  if (chunk * 8 >= size) return {};
  if (wide) return *reinterpret_cast<const uint4*>(row + 16 * chunk);
  std::uint32_t word[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const auto element = [&](int e) {
      return std::uint32_t{reinterpret_cast<const std::uint16_t*>(row)[(chunk * 8 + e) * stride_d]};
    };
    word[n] = element(2 * n) | element(2 * n + 1) << 16;
  }
  return {word[0], word[1], word[2], word[3]};
}

// Where a sequence's rows of the cache are, if it is in pages; a row is then found by its page.
struct Pages {
  const std::int32_t* table;
  Divisor rows;                   // of a page
  std::int64_t count;             // of pages: entries are clamped
  std::int64_t k_pitch, v_pitch;  // bytes from page to page

  __device__ __forceinline__ std::int64_t offset(int row, std::int64_t page_pitch, std::int64_t pitch) const {
    const int page = rows.quotient(row);
    return clamped(table[page], 0, count - 1) * page_pitch + (row - page * static_cast<int>(rows.divisor)) * pitch;
  }
};
struct NoPages {};

// The keys and values of a branch, of this unit: rows [0, stored) lie in memory, and row `stored`, where it is below
// `end`, in shared memory, as this step makes it.
template <bool kPaged>
struct Source {
  const std::byte *k, *v;  // row 0, or that of page 0; v null: no values are wanted
  std::int64_t k_pitch, v_pitch;
  int stored, end;
  const uint4 *fresh_k, *fresh_v;
  std::conditional_t<kPaged, Pages, NoPages> pages;

  __device__ __forceinline__ const std::byte* k_row(int row) const {
    if constexpr (kPaged) return k + pages.offset(row, pages.k_pitch, k_pitch);
    return k + row * k_pitch;
  }
  __device__ __forceinline__ const std::byte* v_row(int row) const {
    if constexpr (kPaged) return v + pages.offset(row, pages.v_pitch, v_pitch);
    return v + row * v_pitch;
  }
};

// Rows [first, first + kTileKeys) into a stage, zeros for those that are not stored. A warp.
template <int kHead, bool kPaged>
__device__ __forceinline__ void load_tile(const NsaStepProblem& problem, const Source<kPaged>& from, int first,
                                          typename SharedMemory<kHead>::Stage& to) {
  using Tile = Tile<kHead>;
  constexpr int kPass = kWarp / Tile::kChunks;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, row = lane / Tile::kChunks, chunk = lane % Tile::kChunks;
  const bool k_column = chunk * 8 < problem.D, v_column = chunk * 8 < problem.Dv;
  const std::uint32_t k_to = ptx::shared_address(&to.k), v_to = ptx::shared_address(&to.v);
#pragma unroll
  for (int n = 0; n < kTileKeys; n += kPass) {
    const int at = first + n + row;
    const bool there = at < from.stored && k_column;
    ptx::copy_async_16(k_to + Tile::offset(n + row, chunk), there ? from.k_row(at) + 16 * chunk : from.k, there);
  }
  if (from.v == nullptr) return;
#pragma unroll
  for (int n = 0; n < kTileKeys; n += kPass) {
    const int at = first + n + row;
    const bool there = at < from.stored && v_column;
    ptx::copy_async_16(v_to + Tile::offset(n + row, chunk), there ? from.v_row(at) + 16 * chunk : from.v, there);
  }
}

// Puts the fresh row into a tile that has landed and has it. The whole warp.
template <int kHead, bool kPaged>
__device__ __forceinline__ void add_fresh_row(const Source<kPaged>& from, int first,
                                              typename SharedMemory<kHead>::Stage& to) {
  using Tile = Tile<kHead>;
  const int row = from.stored - first;
  if (from.stored >= from.end || row < 0 || row >= kTileKeys) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (lane < Tile::kChunks) {
    *reinterpret_cast<uint4*>(to.k.bytes + Tile::offset(row, lane)) = from.fresh_k[lane];
    if (from.v != nullptr) *reinterpret_cast<uint4*>(to.v.bytes + Tile::offset(row, lane)) = from.fresh_v[lane];
  }
  __syncwarp();  // it is there for all lanes
}

}  // namespace heddle::cuda::sm90::nsa_step
