// Keys and values on their way to shared memory, step by step. What does not exist arrives as zeros and is not read:
// whatever lies there, NaN included, meets no product.
#pragma once

#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention_decode/new_rows.cuh"

namespace heddle::cuda::sm80::attention_decode {

// A lane's pieces of the rows of k, or of v: where row 0 (of page 0, in a paged cache) has the first of them, and the
// distance of rows and pages in bytes.
struct Source {
  const std::byte* first;
  std::int64_t row, page;
  int columns;  // from the first piece on

  template <class C>
  __device__ static Source of(const Params& p, const Segment& s, const Operand& x, int head_size, int column) {
    constexpr std::int64_t kBytes = sizeof(typename C::Stored);
    const std::int64_t batch = C::kInt4                               ? p.problem.int4_row(s.b)
                               : p.problem.page_table.data != nullptr ? 0
                                                                      : place_of(p, s.b, 0).batch;
    return {x.data + (batch * x.stride_b + s.head * x.stride_h + column) * kBytes, x.stride_s * kBytes,
            x.stride_b * kBytes, head_size - column};
  }
};

template <class C>
class Loader {
 public:
  __device__ Loader(const Params& params, const Extent& extent, const Segment& segment, SharedMemory<C>& memory)
      : p(params),
        e(extent),
        s(segment),
        shared(memory),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        k(Source::of<C>(p, s, p.problem.k, static_cast<int>(p.problem.D), C::kPiece * (lane % 4))),
        v(Source::of<C>(p, s, p.problem.v, static_cast<int>(p.problem.Dv), C::kPiece * (lane / 4))) {}

  // Starts the copies of the 16 keys from `first` on into a stage, as one group. Of a cache in 4 bits, from the ring.
  __device__ void start(int first, int stage) const {
    if (first < s.end) {
      Stage<C>& to = shared.stage[warp][stage];
      if constexpr (C::kInt4) {
        copy(first, to, [](const Source& x, int slot, bool) { return x.first + slot % kInt4Tail * x.row; });
      } else if (first + kStepKeys > e.new_begin) {
        add_new(first, stage, to);
      } else if (p.problem.page_table.data == nullptr) {
        copy(first, to, [](const Source& x, int slot, bool) { return x.first + slot * x.row; });
      } else {
        copy(first, to, [&](const Source& x, int slot, bool exists) { return paged_row(x, slot, exists); });
      }
      if constexpr (C::kE4m3) start_scales(first, stage);
    }
    ptx::copy_async_commit();
  }

 private:
  // The page table is read for rows that exist only.
  __device__ const std::byte* paged_row(const Source& x, int slot, bool exists) const {
    if (!exists) return x.first;
    const Paged at = paged(p, s.b, slot);
    return x.first + clamped_page(p, at.page) * x.page + at.row * x.row;
  }

  // The slots of which a lane copies pieces: of two keys, and of four values.
  __device__ int key_slot(int first, int n) const { return first + static_cast<int>(lane) / 4 + 8 * n; }
  __device__ int value_slot(int first, int n) const {
    return first + static_cast<int>(lane) % 4 * 2 + n % 2 + n / 2 * 8;
  }

  // address(source, slot, exists): of the lane's first piece of a row.
  template <class Address>
  __device__ void copy(int first, Stage<C>& to, Address address) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int slot = key_slot(first, n);
      const bool exists = slot < s.end;
      copy_row<C::kKeyPieces, 4 * C::kPiece>(address(k, slot, exists), exists ? k.columns : 0, &to.k[n][0][lane]);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int slot = value_slot(first, n);
      const bool exists = slot < s.end;
      copy_row<C::kValuePieces, 8 * C::kPiece>(address(v, slot, exists), exists ? v.columns : 0, &to.v[n][0][lane]);
    }
  }

  // kPieces pieces of a row, kStep elements apart, as far as it has columns; the next of a piece lies 32 lanes further.
  template <int kPieces, int kStep>
  __device__ static void copy_row(const std::byte* from, int columns, uint4* to) {
    const std::uint32_t address = ptx::shared_address(to);
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      ptx::copy_async_16(address + c * 32 * sizeof(uint4), from + c * kStep * sizeof(typename C::Stored),
                         c * kStep < columns);
    }
  }

  // Scales of the keys by lanes 0 to 15, of the values by the others.
  __device__ void start_scales(int first, int stage) const {
    const Scales& scales = lane < kStepKeys ? p.problem.k_scale : p.problem.v_scale;
    const int slot = first + static_cast<int>(lane) % kStepKeys;
    const bool exists = slot < s.end && scales.data != nullptr;
    const Append& append = p.problem.append;
    if (exists && slot >= e.new_begin && (lane < kStepKeys ? append.finds_k_scale : append.finds_v_scale)) return;
    const float* from = scales.data;
    if (exists) {
      const Place at = place_of(p, s.b, slot);
      from += at.batch * scales.stride_b + at.row * scales.stride_s + s.head * scales.stride_h;
    }
    StageScales& to = shared.scales[warp][stage];
    ptx::copy_async_4(ptx::shared_address(lane < kStepKeys ? &to.k[lane] : &to.v[lane - kStepKeys]), from, exists);
  }

  // As copy(), where appended rows are among the 16. They are computed here rather than read from the cache, where only
  // the CTAs of tile 0 write them.
  __device__ void add_new(int first, int stage, Stage<C>& to) const {
    const AttentionProblem& a = p.problem;
    const auto old = [&](const Source& x, int slot, auto copy) {
      const bool exists = slot < s.end;
      const std::byte* from = a.page_table.data != nullptr ? paged_row(x, slot, exists) : x.first + slot * x.row;
      copy(from, exists ? x.columns : 0);
    };
#pragma unroll 1
    for (int n = 0; n < 2; ++n) {
      const int slot = key_slot(first, n);
      uint4* const put = &to.k[n][0][lane];
      if (slot < e.new_begin || slot >= s.end) {
        old(k, slot,
            [&](const std::byte* from, int columns) { copy_row<C::kKeyPieces, 4 * C::kPiece>(from, columns, put); });
        continue;
      }
      const Place place = place_of(p, s.b, slot);
      NewRow<C> row(a.append.k_new, a.k, a.k_scale, a.append.rotary, a.append.finds_k_scale,
                    static_cast<int>(a.append.rotary.dims), s, slot - e.new_begin, slot, static_cast<int>(a.D), place);
      if constexpr (C::kE4m3) {
        if (a.append.finds_k_scale) {
          row.template find_scale<C::kKeyPieces, 4 * C::kPiece, 1, 4>(C::kPiece * (static_cast<int>(lane) % 4),
                                                                      a.k_scale, s, place,
                                                                      &shared.scales[warp][stage].k[slot - first]);
        }
      }
#pragma unroll 1
      for (int c = 0; c < C::kKeyPieces; ++c) {
        row.piece(C::kPiece * (4 * c + static_cast<int>(lane) % 4), put + 32 * c);
      }
    }
#pragma unroll 1
    for (int n = 0; n < 4; ++n) {
      const int slot = value_slot(first, n);
      uint4* const put = &to.v[n][0][lane];
      if (slot < e.new_begin || slot >= s.end) {
        old(v, slot,
            [&](const std::byte* from, int columns) { copy_row<C::kValuePieces, 8 * C::kPiece>(from, columns, put); });
        continue;
      }
      const Place place = place_of(p, s.b, slot);
      NewRow<C> row(a.append.v_new, a.v, a.v_scale, a.append.rotary, a.append.finds_v_scale, 0, s, slot - e.new_begin,
                    slot, static_cast<int>(a.Dv), place);
      if constexpr (C::kE4m3) {
        if (a.append.finds_v_scale) {
          row.template find_scale<C::kValuePieces, 8 * C::kPiece, 4, 32>(C::kPiece * (static_cast<int>(lane) / 4),
                                                                         a.v_scale, s, place,
                                                                         &shared.scales[warp][stage].v[slot - first]);
        }
      }
#pragma unroll 1
      for (int c = 0; c < C::kValuePieces; ++c) {
        row.piece(C::kPiece * (8 * c + static_cast<int>(lane) / 4), put + 32 * c);
      }
    }
  }

  const Params& p;
  const Extent& e;
  const Segment& s;
  SharedMemory<C>& shared;
  const unsigned lane, warp;
  const Source k, v;
};

}  // namespace heddle::cuda::sm80::attention_decode
