// From products q . k to logits. A warp's scores of a step lie as mma_16816 leaves them: element 2 r + c
// of block n is (packed row lane / 4 + 8 r, key 8 n + 2 (lane % 4) + c).
//
// Masking selects: whatever a masked score was, NaN included, it becomes -inf.
#pragma once

#include "cuda/common/attention/log2.h"
#include "cuda/common/attention/rows.cuh"
#include "cuda/common/attention/softcap.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/sm80/attention_decode/new_rows.cuh"

namespace heddle::cuda::sm80::attention_decode {

// One of a lane's two packed rows: it attends the slots [begin, end).
struct ScoreRow {
  PackedRow at;
  int begin, end;

  __device__ ScoreRow(const Params& p, const Extent& e, const Segment& s, int row) : at(p, s, row) {
    begin = e.first_slot + p.band.begin(e.off, at.i);
    end = at.i < e.sq ? e.first_slot + min(p.band.end(e.off, at.i), e.sk) : 0;
  }
};

template <class C>
class Scores {
 public:
  __device__ Scores(const Params& params, const Extent& extent, const Segment& segment)
      : p(params), e(extent), s(segment) {
    int latest_begin = 0, first_end = s.end;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const ScoreRow row = row_of(r, 0);
      if (row.at.i >= e.sq) continue;  // rows beyond the last need no mask: nobody reads their results
      latest_begin = max(latest_begin, row.begin);
      first_end = min(first_end, row.end);
    }
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      latest_begin = max(latest_begin, __shfl_xor_sync(0xffffffff, latest_begin, lanes));
      first_end = min(first_end, __shfl_xor_sync(0xffffffff, first_end, lanes));
    }
    whole_begin = latest_begin;
    whole_end = p.score_options ? 0 : first_end;
  }

  // Whether nothing is to be done to the scores of the keys from `first` on but to scale them.
  __device__ bool plain(int first, int keys = kStepKeys) const {
    return whole_begin <= first && first + keys <= whole_end;
  }

  // Softcap, ALiBi and masks for the scores of the keys from slot `first` on. Returns which of the lane's keys any row
  // attends: bit 2 n + c.
  __device__ std::uint32_t finish(int first, float (&x)[2][4]) const {
    const int slot = first + 2 * (static_cast<int>(threadIdx.x) % 4);
    const AttentionProblem& a = p.problem;
    if (a.softcap > 0) {
      const float to_exponent = 2 * kLog2e / a.softcap, twice = 2 * a.softcap;
      for_each(slot, x, [=](float& y, int, int, int, int) { y = capped(y, to_exponent, twice); });
    }
    const ScoreRow rows[2] = {row_of(0, first), row_of(1, first)};
    if (a.alibi.data != nullptr) add_alibi(rows, slot, x);
    for_each(slot, x, [&](float& y, int r, int at, int, int) {
      if (at < rows[r].begin || at >= min(rows[r].end, s.end)) y = -INFINITY;
    });
    if (a.bias.data != nullptr || a.mask.data != nullptr || a.draft_mask.data != nullptr) add_planes(rows, slot, x);
    std::uint32_t attended = 0;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        attended |= static_cast<std::uint32_t>(x[n][c] != -INFINITY || x[n][2 + c] != -INFINITY) << (2 * n + c);
      }
    }
    return any_of_quads(attended);
  }

 private:
  // Computed anew in each step that needs it, which is rare, not kept in registers. first is never negative, so that
  // first >> 31 is 0; but the compiler does not know, and cannot move the computation out of the loop over steps.
  __device__ ScoreRow row_of(int r, int first) const {
    return ScoreRow(p, e, s, static_cast<int>(threadIdx.x) % 32 / 4 + 8 * r + (first >> 31));
  }

  // Calls visit(score, r, slot, n, c) for each.
  template <class Visit>
  __device__ static void for_each(int slot, float (&x)[2][4], Visit visit) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int k = 0; k < 4; ++k) visit(x[n][k], k / 2, slot + 8 * n + k % 2, n, k % 2);
    }
  }

  __device__ void add_alibi(const ScoreRow (&rows)[2], int slot, float (&x)[2][4]) const {
    const Plane& alibi = p.problem.alibi;
    float slope[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      slope[r] = rows[r].at.i < e.sq
                     ? reinterpret_cast<const float*>(alibi.data)[s.b * alibi.stride_b + rows[r].at.h * alibi.stride_h]
                     : 0.0f;
    }
    for_each(slot, x, [&](float& y, int r, int at, int, int) {
      y = fmaf(-slope[r], static_cast<float>(abs(rows[r].at.i + e.off - (at - e.first_slot))), y);
    });
  }

  // Bias, boolean mask and the draft's mask. What is -inf already is not looked up, since it may not exist.
  __device__ void add_planes(const ScoreRow (&rows)[2], int slot, float (&x)[2][4]) const {
    const AttentionProblem& a = p.problem;
    for_each(slot, x, [&](float& y, int r, int at, int, int) {
      if (y == -INFINITY) return;
      const int j = at - e.first_slot;
      if (a.draft_mask.data != nullptr && a.draft_removes(s.b, {.sq = e.sq, .sk = e.sk}, rows[r].at.i, j)) {
        y = -INFINITY;
        return;
      }
      if (a.mask.data != nullptr &&
          reinterpret_cast<const std::uint8_t*>(a.mask.data)[offset(a.mask, rows[r].at, j)] == 0) {
        y = -INFINITY;
        return;
      }
      if (a.bias.data != nullptr) {
        const std::int64_t n = offset(a.bias, rows[r].at, j);
        const float bias = a.bias.dtype == DType::f32
                               ? reinterpret_cast<const float*>(a.bias.data)[n]
                               : to_float(reinterpret_cast<const typename C::Element*>(a.bias.data)[n]);
        y = bias == -INFINITY ? -INFINITY : y + bias;
      }
    });
  }

  __device__ std::int64_t offset(const Plane& plane, const PackedRow& row, int j) const {
    return s.b * plane.stride_b + row.h * plane.stride_h + row.i * plane.stride_i + j * plane.stride_j;
  }

  const Params& p;
  const Extent& e;
  const Segment& s;
  int whole_begin, whole_end;  // slots that every row attends, if that is all
};

}  // namespace heddle::cuda::sm80::attention_decode
