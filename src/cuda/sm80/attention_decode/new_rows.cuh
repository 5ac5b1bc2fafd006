// What a call brings itself: query rows and appended keys and values, element by element, rotated by their positions.
#pragma once

#include "core/dtypes.h"
#include "cuda/common/rotary.cuh"
#include "cuda/sm80/attention_decode/schedule.cuh"

namespace heddle::cuda::sm80::attention_decode {

// A slot of a paged cache, as the page table has it.
struct Paged {
  int page, row;
};

__device__ inline Paged paged(const Params& p, int b, int slot) {
  const unsigned n = p.page_size.quotient(static_cast<unsigned>(slot));
  return {p.problem.page_table[b * p.problem.page_table_stride + n], slot - static_cast<int>(n * p.page_size.divisor)};
}

// Pages and cache rows outside the cache are not read.
__device__ inline int clamped_page(const Params& p, int page) { return min(max(page, 0), p.last_batch); }

// Where a slot is stored: in which page or cache row, and where in it. valid: the index data named one that exists.
struct Place {
  std::int64_t batch;
  int row;
  bool valid;
};

__device__ inline Place place_of(const Params& p, int b, int slot) {
  const AttentionProblem& a = p.problem;
  if (a.cu_seqlens_k.data != nullptr) return {0, slot, true};
  Paged at{b, slot};
  if (a.page_table.data != nullptr) {
    at = paged(p, b, slot);
  } else if (a.cache_batch_idx.data != nullptr) {
    at.page = a.cache_batch_idx[b];
  }
  const int inside = clamped_page(p, at.page);
  return {inside, at.row, inside == at.page};
}

template <class T>
__device__ T as_element(float x) {
  if constexpr (sizeof(T) == 1) {
    return f32_to_f8e4m3(x);
  } else {
    return static_cast<T>(x);  // to nearest even
  }
}

// A row of 16-bit floats whose first `dims` elements are rotated as those of a position.
template <class T>
struct RotatedRow {
  const T* data;
  std::int64_t stride;
  const RotaryTables& tables;
  int dims;
  std::int64_t position;

  __device__ RotatedRow(const std::byte* row, std::int64_t stride_d, const RotaryTables& rotary, int rotated,
                        std::int64_t at)
      : data(reinterpret_cast<const T*>(row)), stride(stride_d), tables(rotary), dims(rotated) {
    position = clamped(at, 0, rotary.positions - 1);
  }
  __device__ bool rotates(int d) const { return d < dims; }
  __device__ T plain(int d) const { return data[d * stride]; }
  __device__ float rotated(int d) const {
    const int half = dims / 2;
    const bool first = tables.interleaved ? d % 2 == 0 : d < half;
    const int pair = tables.interleaved ? d / 2 : first ? d : d - half;
    const int other = tables.interleaved ? d ^ 1 : first ? d + half : pair;
    float x = to_float(plain(first ? d : other)), y = to_float(plain(first ? other : d));
    angle_at<T>(tables, position, pair).turn(x, y);
    return first ? x : y;
  }
};

// A key or value that the call appends, as the cache stores it.
template <class C>
class NewRow {
  using T = typename C::Element;
  using Stored = typename C::Stored;

 public:
  // cache: where row `row` of `news` belongs at `place`; CTAs of the first tile write it.
  __device__ NewRow(const Operand& news, const Operand& cache, const Scales& scales, const RotaryTables& rotary,
                    bool finds_scale, int rotated, const Segment& s, int row, int slot, int head_size,
                    const Place& place)
      : from(news.data + (s.b * news.stride_b + row * news.stride_s + s.head * news.stride_h) * 2, news.stride_d,
             rotary, rotated, slot),
        size(head_size),
        scale(C::kE4m3 && !finds_scale ? scales.at(0, 0, s.head) : 1.0f) {
    written = reinterpret_cast<Stored*>(cache.data) +
              (place.batch * cache.stride_b + place.row * cache.stride_s + s.head * cache.stride_h);
    writes = s.tile == 0 && place.valid;
  }

  // Finds the row's scale, for `kept` and the cache. The lanes that share the row, whose numbers differ in the bits
  // from kLowest up to below kHighest, have kPieces pieces each, kStep elements apart; column: of this lane's first.
  template <int kPieces, int kStep, int kLowest, int kHighest>
  __device__ void find_scale(int column, const Scales& scales, const Segment& s, const Place& place, float* kept) {
    float largest = 0.0f;
#pragma unroll 1
    for (int n = 0; n < kPieces * C::kPiece; ++n) {
      const int d = column + n / C::kPiece * kStep + n % C::kPiece;
      if (d < size) largest = fmaxf(largest, fabsf(value(d)));
    }
    const unsigned lane = threadIdx.x % 32, own = lane & ~static_cast<unsigned>(kHighest - kLowest);
    constexpr unsigned kSharing = kHighest == 4 ? 0x0000000Fu : 0x11111111u;
    static_assert((kLowest == 1 && kHighest == 4) || (kLowest == 4 && kHighest == 32));
#pragma unroll
    for (int lanes = kLowest; lanes < kHighest; lanes *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kSharing << own, largest, lanes));
    }
    scale = row_scale(largest);
    if (lane != own) return;
    *kept = scale;
    if (writes) *scales.place(place.batch, place.row, s.head) = scale;
  }

  // The elements from `column` on that a piece holds.
  __device__ void piece(int column, uint4* to) const {
#pragma unroll 8
    for (int i = 0; i < C::kPiece; ++i) {
      const int d = column + i;
      Stored x{};
      if (d < size) {
        if constexpr (C::kE4m3) {
          x = as_element<Stored>(__fdiv_rn(value(d), scale));
        } else {
          x = from.rotates(d) ? as_element<Stored>(from.rotated(d)) : from.plain(d);
        }
        if (writes) written[d] = x;
      }
      reinterpret_cast<Stored*>(to)[i] = x;
    }
  }

 private:
  __device__ float value(int d) const { return from.rotates(d) ? from.rotated(d) : to_float(from.plain(d)); }

  RotatedRow<T> from;
  int size;
  float scale;
  Stored* written;
  bool writes;
};

// Packed row r of a tile: head r % G of the group, row r / G of the sequence.
struct PackedRow {
  int i, h;
  __device__ PackedRow(const Params& p, const Segment& s, int row) {
    const unsigned packed = kRows * s.tile + row;
    i = static_cast<int>(p.group.quotient(packed));
    h = s.head * static_cast<int>(p.group.divisor) + static_cast<int>(packed - i * p.group.divisor);
  }
};

// The tile's query rows to shared memory; rows and dimensions that do not exist as zeros.
template <class C>
__device__ void load_query(const Params& p, const Extent& e, const Segment& s, SharedMemory<C>& shared) {
  using T = typename C::Element;
  constexpr int kPieces = C::kHeadSize / 8;
  const AttentionProblem& a = p.problem;
  const int size = static_cast<int>(a.D);
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < kRows * kPieces; n += C::kThreads) {
    const int row = n / kPieces, d = n % kPieces * 8;
    const PackedRow packed(p, s, row);
    uint4* const to = reinterpret_cast<uint4*>(&shared.query().row[row][d]);
    if (packed.i >= e.sq || d >= size) {
      *to = uint4{};
      continue;
    }
    const std::int64_t position = a.append.rotary.dims > 0 ? a.seqused_k[s.b] + (a.append.by_row ? packed.i : 0) : 0;
    const RotatedRow<T> from(
        a.q.data + (s.b * a.q.stride_b + (e.q_row + packed.i) * a.q.stride_s + packed.h * a.q.stride_h) * 2,
        a.q.stride_d, a.append.rotary, static_cast<int>(a.append.rotary.dims), position);
    if (p.q_aligned && !from.rotates(d)) {
      *to = *reinterpret_cast<const uint4*>(from.data + d);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      shared.query().row[row][d + i] = d + i >= size         ? as_element<T>(0.0f)
                                       : from.rotates(d + i) ? as_element<T>(from.rotated(d + i))
                                                             : from.plain(d + i);
    }
  }
}

}  // namespace heddle::cuda::sm80::attention_decode
