// Keys and values on their way to shared memory, step by step. What does not exist arrives as zeros and is not read:
// whatever lies there, NaN included, meets no product.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/sm80/attention_decode/new_rows.cuh"
#include "cuda/sm80/attention_decode/schedule.cuh"

namespace heddle::cuda::sm80::attention_decode {

template <class C>
class Loader {
 public:
  __device__ Loader(const Params& params, const Extent& extent, const Segment& segment, SharedMemory<C>& memory)
      : p(params), e(extent), s(segment), shared(memory), lane(threadIdx.x % 32), warp(threadIdx.x / 32) {}

  // Starts the copies of the 16 keys from `first` on into a stage, as one group.
  __device__ void start(int first, int stage) {
    if (first < s.end) {
      Stage<C>& to = shared.stage[warp][stage];
      const int quad = lane / 4, t = lane % 4;
      const AttentionProblem& a = p.problem;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        copy_row<C::kKeyPieces, 4 * C::kPiece>(a.k, static_cast<int>(a.D), first + quad + 8 * n, C::kPiece * t,
                                               &to.k[n][0][lane]);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        copy_row<C::kValuePieces, 8 * C::kPiece>(a.v, static_cast<int>(a.Dv), first + 2 * t + n % 2 + n / 2 * 8,
                                                 C::kPiece * quad, &to.v[n][0][lane]);
      }
      if constexpr (C::kE4m3) start_scales(first, stage);
      if (first + kStepKeys > e.new_begin) add_new(first, to);
    }
    ptx::copy_async_commit();
  }

 private:
  // kPieces pieces of a row, kStep elements apart, from element `column` on. A piece's next lies 32 lanes further.
  template <int kPieces, int kStep>
  __device__ void copy_row(const Operand& x, int size, int slot, int column, uint4* to) const {
    if (slot >= e.new_begin && slot < s.end) return;  // add_new() writes it
    const bool exists = slot < s.end;
    const std::byte* from = x.data;
    if (exists) {
      const Place at = place_of(p, s.b, slot);
      from += (at.batch * x.stride_b + at.row * x.stride_s + s.head * x.stride_h + column) *
              static_cast<std::int64_t>(sizeof(typename C::Stored));
    }
    const std::uint32_t address = ptx::shared_address(to);
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      ptx::copy_async_16(address + c * 32 * sizeof(uint4), from + c * kStep * sizeof(typename C::Stored),
                         exists && column + c * kStep < size);
    }
  }

  // Scales of the keys by lanes 0 to 15, of the values by the others.
  __device__ void start_scales(int first, int stage) const {
    const Scales& scales = lane < kStepKeys ? p.problem.k_scale : p.problem.v_scale;
    const int slot = first + static_cast<int>(lane) % kStepKeys;
    const bool exists = slot < s.end && scales.data != nullptr;
    const float* from = scales.data;
    if (exists) {
      const Place at = place_of(p, s.b, slot);
      from += at.batch * scales.stride_b + at.row * scales.stride_s + s.head * scales.stride_h;
    }
    StageScales& to = shared.scales[warp][stage];
    ptx::copy_async_4(ptx::shared_address(lane < kStepKeys ? &to.k[lane] : &to.v[lane - kStepKeys]), from, exists);
  }

  // Appended rows among the 16: computed here rather than read from the cache, where only the CTAs of tile 0 write
  // them.
  __device__ void add_new(int first, Stage<C>& to) const {
    const AttentionProblem& a = p.problem;
    const int quad = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int n = 0; n < 2; ++n) {
      const int slot = first + quad + 8 * n;
      if (slot < e.new_begin || slot >= s.end) continue;
      const NewRow<C> row(a.append.k_new, a.k, a.k_scale, a.append.rotary, static_cast<int>(a.append.rotary.dims), s,
                          slot - e.new_begin, slot, static_cast<int>(a.D), place_of(p, s.b, slot));
#pragma unroll 1
      for (int c = 0; c < C::kKeyPieces; ++c) row.piece(C::kPiece * (4 * c + t), &to.k[n][c][lane]);
    }
#pragma unroll 1
    for (int n = 0; n < 4; ++n) {
      const int slot = first + 2 * t + n % 2 + n / 2 * 8;
      if (slot < e.new_begin || slot >= s.end) continue;
      const NewRow<C> row(a.append.v_new, a.v, a.v_scale, a.append.rotary, 0, s, slot - e.new_begin, slot,
                          static_cast<int>(a.Dv), place_of(p, s.b, slot));
#pragma unroll 1
      for (int c = 0; c < C::kValuePieces; ++c) row.piece(C::kPiece * (8 * c + quad), &to.v[n][c][lane]);
    }
  }

  const Params& p;
  const Extent& e;
  const Segment& s;
  SharedMemory<C>& shared;
  const unsigned lane, warp;
};

}  // namespace heddle::cuda::sm80::attention_decode
