// Rows of q, k and v on their way to shared memory. Rows outside [begin, end) and columns from `size` on arrive as
// zeros and are not read: whatever lies there, NaN included, meets no product.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/sm80/attention_fwd/schedule.cuh"

namespace heddle::cuda::sm80::attention_fwd {

// A source names row after row of one head. Rows at a constant distance:
struct DenseRows {
  const std::byte* row;
  std::int64_t stride;  // bytes
  __device__ DenseRows(const std::byte* data, std::int64_t bytes, int first)
      : row(data + first * bytes), stride(bytes) {}
  __device__ const std::byte* get(bool) const { return row; }
  __device__ void advance(int rows) { row += rows * stride; }
};

// Keys in pages. data: page 0, slot 0.
struct PagedRows {
  const std::byte* data;
  const Operand& x;
  const std::int32_t* pages;
  unsigned page_size, slot;
  // The page table is read for rows that exist only.
  __device__ const std::byte* get(bool exists) const {
    if (!exists) return data;
    const unsigned page = slot / page_size;
    return data + 2 * (pages[page] * x.stride_b + (slot - page * page_size) * x.stride_s);
  }
  __device__ void advance(int rows) { slot += rows; }
};

struct AlignedRows {
  // make_source(j): one that stands at row j. first: the row that goes to row 0 of the tile.
  template <class T, int kRows, int kColumns, class MakeSource>
  __device__ static void load(Tile<T, kRows, kColumns>& tile, const Operand&, int size, int first, int begin, int end,
                              MakeSource make_source) {
    constexpr int kChunks = kColumns / 8, kPass = kThreads / kChunks;
    const int thread = recomputed(static_cast<int>(threadIdx.x)), chunk = thread % kChunks, row = thread / kChunks;
    const int bytes = min(max(2 * (size - 8 * chunk), 0), 16);
    const std::uint32_t to = ptx::shared_address(&tile);
    const int from_begin = first + row - begin;
    auto source = make_source(first + row);
#pragma unroll
    for (int i = 0; i < kRows; i += kPass) {
      const bool exists = static_cast<unsigned>(from_begin + i) < static_cast<unsigned>(end - begin);
      ptx::copy_async_16(to + swizzled(tile.kPitch, row + i, chunk), source.get(exists) + 16 * chunk,
                         exists ? bytes : 0);
      source.advance(kPass);
    }
  }
};

struct StridedRows {
  template <class T, int kRows, int kColumns, class MakeSource>
  __device__ static void load(Tile<T, kRows, kColumns>& tile, const Operand& x, int size, int first, int begin, int end,
                              MakeSource make_source) {
    constexpr int kChunks = kColumns / 8, kPass = kThreads / kChunks;
    const int chunk = static_cast<int>(threadIdx.x) % kChunks, row = static_cast<int>(threadIdx.x) / kChunks;
    auto source = make_source(first + row);
#pragma unroll 1
    for (int i = 0; i < kRows; i += kPass, source.advance(kPass)) {
      std::uint16_t element[8] = {};
      const int j = first + row + i;
      if (begin <= j && j < end) {
        const auto* from = reinterpret_cast<const std::uint16_t*>(source.get(true));
#pragma unroll
        for (int d = 0; d < 8; ++d) {
          if (8 * chunk + d < size) element[d] = from[(8 * chunk + d) * x.stride_d];
        }
      }
      uint4 words;
      words.x = element[0] | element[1] << 16;
      words.y = element[2] | element[3] << 16;
      words.z = element[4] | element[5] << 16;
      words.w = element[6] | element[7] << 16;
      *reinterpret_cast<uint4*>(reinterpret_cast<std::byte*>(&tile) + swizzled(tile.kPitch, row + i, chunk)) = words;
    }
  }
};

template <class C>
__device__ void load_q(const Params& p, const Work& w, SharedMemory<C>& shared) {
  const Operand& q = p.problem.q;
  const std::byte* head = q.data + 2 * (w.b * q.stride_b + w.q_row * q.stride_s + w.h * q.stride_h);
  C::Rows::load(shared.q, q, static_cast<int>(p.problem.D), w.first, 0, w.sq,
                [&](int i) { return DenseRows(head, 2 * q.stride_s, i); });
}

// One key tile of k or v.
template <class C>
__device__ void load_keys(const Params& p, const Work& w, const Operand& x, std::int64_t size, int tile,
                          Tile<typename C::Element, C::kTileK, C::kHeadSize>& to) {
  const AttentionProblem& a = p.problem;
  const std::byte* head = x.data + 2 * (w.kv_head * x.stride_h);
  const auto load = [&](auto make_source) {
    C::Rows::load(to, x, static_cast<int>(size), tile * C::kTileK, w.begin, w.end, make_source);
  };
  if (a.page_table != nullptr) {
    load([&](int j) {
      return PagedRows{head, x, a.page_table + w.b * a.page_table_stride, static_cast<unsigned>(a.page_size),
                       static_cast<unsigned>(w.k_slot + j)};
    });
  } else {
    load([&](int j) {
      return DenseRows(head + 2 * (w.k_b * x.stride_b), 2 * x.stride_s, static_cast<int>(w.k_slot) + j);
    });
  }
}

}  // namespace heddle::cuda::sm80::attention_fwd
