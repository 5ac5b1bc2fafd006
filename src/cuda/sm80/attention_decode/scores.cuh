// From products q . k to logits in log2 units. A warp's scores of a step lie as mma_16816 leaves them: element 2 r + c
// of block n is (packed row lane / 4 + 8 r, key 8 n + 2 (lane % 4) + c).
//
// Masking selects: whatever a masked score was, NaN included, it becomes -inf.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/sm80/attention_decode/new_rows.cuh"

namespace heddle::cuda::sm80::attention_decode {

// softcap * tanh(x / softcap) from one exponential; its error is 2^-22 of softcap, not of x.
__device__ inline float soft_cap(float x, float to_exponent, float twice) {
  return 0.5f * twice - __fdividef(twice, 1.0f + ptx::exp2_approx(x * to_exponent));
}

// What the scores of a lane's two rows need, by slot: row r attends the slots [begin[r], end[r]).
template <class C>
class Scores {
 public:
  __device__ Scores(const Params& params, const Extent& extent, const Segment& segment)
      : p(params), e(extent), s(segment) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int latest_begin = 0, first_end = kOpen + (kOpen - 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const PackedRow row(p, s, lane / 4 + 8 * r);
      i[r] = row.i;
      h[r] = row.h;
      begin[r] = e.first_slot + max(row.i + e.off - p.left, 0);
      end[r] = row.i < e.sq ? e.first_slot + min(row.i + e.off + p.right + 1, e.sk) : 0;
      // Rows beyond the last do not call for a mask: nobody reads them.
      if (row.i < e.sq) {
        latest_begin = max(latest_begin, begin[r]);
        first_end = min(first_end, end[r]);
      }
    }
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      latest_begin = max(latest_begin, __shfl_xor_sync(0xffffffff, latest_begin, lanes));
      first_end = min(first_end, __shfl_xor_sync(0xffffffff, first_end, lanes));
    }
    whole_begin = latest_begin;
    whole_end = min(first_end, s.end);
  }

  // Finishes the scores of the keys from slot `first` on. factor: by which the products of a key are multiplied first.
  // Returns which of the lane's keys any row attends: bit 2 n + c.
  __device__ std::uint32_t finish(int first, const float (&factor)[2][2], float (&x)[2][4]) const {
    const int slot = first + 2 * (static_cast<int>(threadIdx.x) % 4);
    const AttentionProblem& a = p.problem;
    for_each(slot, x, [&](float& y, int, int, int n, int c) { y *= factor[n][c]; });
    if (a.softcap > 0) {
      const float to_exponent = 2 / a.softcap, twice = 2 * a.softcap * kLog2e;
      for_each(slot, x, [=](float& y, int, int, int, int) { y = soft_cap(y, to_exponent, twice); });
    }
    if (a.alibi.data != nullptr) add_alibi(slot, x);
    if (whole_begin <= first && first + kStepKeys <= whole_end && !p.planes) return ~0u;
    for_each(slot, x, [&](float& y, int r, int at, int, int) {
      if (at < begin[r] || at >= min(end[r], s.end)) y = -INFINITY;
    });
    if (p.planes) add_planes(slot, x);
    std::uint32_t attended = 0;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        attended |= static_cast<std::uint32_t>(x[n][c] != -INFINITY || x[n][2 + c] != -INFINITY) << (2 * n + c);
      }
    }
    for (int lanes = 4; lanes < 32; lanes *= 2) attended |= __shfl_xor_sync(0xffffffff, attended, lanes);
    return attended;
  }

 private:
  // Calls visit(score, r, slot, n, c) for each.
  template <class Visit>
  __device__ static void for_each(int slot, float (&x)[2][4], Visit visit) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int k = 0; k < 4; ++k) visit(x[n][k], k / 2, slot + 8 * n + k % 2, n, k % 2);
    }
  }

  __device__ void add_alibi(int slot, float (&x)[2][4]) const {
    const Plane& alibi = p.problem.alibi;
    float slope[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      slope[r] = i[r] < e.sq
                     ? reinterpret_cast<const float*>(alibi.data)[s.b * alibi.stride_b + h[r] * alibi.stride_h] * kLog2e
                     : 0.0f;
    }
    for_each(slot, x, [&](float& y, int r, int at, int, int) {
      y = fmaf(-slope[r], static_cast<float>(abs(i[r] + e.off - (at - e.first_slot))), y);
    });
  }

  // Bias, boolean mask and the draft's mask. What is -inf already is not looked up, since it may not exist.
  __device__ void add_planes(int slot, float (&x)[2][4]) const {
    const AttentionProblem& a = p.problem;
    for_each(slot, x, [&](float& y, int r, int at, int, int) {
      if (y == -INFINITY) return;
      const int j = at - e.first_slot;
      if (a.draft_mask != nullptr && a.draft_removes(s.b, {.sq = e.sq, .sk = e.sk}, i[r], j)) {
        y = -INFINITY;
        return;
      }
      if (a.mask.data != nullptr && reinterpret_cast<const std::uint8_t*>(a.mask.data)[offset(a.mask, r, j)] == 0) {
        y = -INFINITY;
        return;
      }
      if (a.bias.data != nullptr) {
        const std::int64_t n = offset(a.bias, r, j);
        const float bias = a.bias.dtype == DType::f32
                               ? reinterpret_cast<const float*>(a.bias.data)[n]
                               : to_float(reinterpret_cast<const typename C::Element*>(a.bias.data)[n]);
        y = bias == -INFINITY ? -INFINITY : fmaf(bias, kLog2e, y);
      }
    });
  }

  __device__ std::int64_t offset(const Plane& plane, int r, int j) const {
    return s.b * plane.stride_b + h[r] * plane.stride_h + i[r] * plane.stride_i + j * plane.stride_j;
  }

  const Params& p;
  const Extent& e;
  const Segment& s;
  int i[2], h[2], begin[2], end[2], whole_begin, whole_end;
};

}  // namespace heddle::cuda::sm80::attention_decode
