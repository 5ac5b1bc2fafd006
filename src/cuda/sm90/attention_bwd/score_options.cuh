// What changes scores pair by pair: softcap, ALiBi, bias, mask.
#pragma once

#include "cuda/any/attention_bwd_rows/large_rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/sm90/attention_bwd/scores.cuh"

namespace heddle::cuda::sm90::attention_bwd {

// A thread's elements of a bias or mask: of query 8 j + c from its first one on, and key 8 r.
template <class Element>
struct PlaneElements {
  const Element* first;
  std::int64_t stride_i, stride_j;

  __device__ PlaneElements(const Plane& x, const Work& w, int head, int i, int j)
      : first(reinterpret_cast<const Element*>(x.data) + x.offset(w.sequence, head, i, j)),
        stride_i(x.stride_i),
        stride_j(x.stride_j) {}
  __device__ Element at(int query, int key) const { return first[query * stride_i + key * stride_j]; }
};

// ALiBi, bias, mask. x: products of part of a tile, which become logits, or -inf. i, j: position of this
// thread's first query, and its first key.
template <class C, int kCount>
__device__ __forceinline__ void apply_planes(const Params& p, const Work& w, int head, int i, int j,
                                             float (&x)[kCount]) {
  const AttentionBackwardProblem& problem = p.problem;
  using T = typename C::Element;
  // exists(query, key): what lies beyond the lengths is not read.
  const int queries = w.sq - i, keys = w.first_key + w.keys - j;
  const auto visit = [&](const auto& change) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) change(x[n], n / 4 * 8 + n % 2, n / 2 % 2 * 8);
  };
  const auto visit_existing = [&](const auto& change) {
    visit([&](float& score, int query, int key) {
      if (query < queries && key < keys) change(score, query, key);
    });
  };
#pragma unroll
  for (int n = 0; n < kCount; ++n) x[n] *= problem.scale;
  if (problem.alibi.data != nullptr) {
    const float slope = reinterpret_cast<const float*>(
        problem.alibi.data)[w.sequence * problem.alibi.stride_b + head * problem.alibi.stride_h];
    visit([&](float& score, int query, int key) {
      score = fmaf(-slope, fabsf(static_cast<float>(i + query + w.off - j - key)), score);
    });
  }
  // A bias of -inf removes the pair, whatever its score was: NaN - inf would be NaN.
  const auto add = [](float& score, float bias) { score = bias == -INFINITY ? bias : score + bias; };
  if (problem.bias.data != nullptr && problem.bias.dtype == DType::f32) {
    const PlaneElements<float> bias(problem.bias, w, head, i, j);
    visit_existing([&](float& score, int query, int key) { add(score, bias.at(query, key)); });
  } else if (problem.bias.data != nullptr) {
    const PlaneElements<T> bias(problem.bias, w, head, i, j);
    visit_existing([&](float& score, int query, int key) { add(score, static_cast<float>(bias.at(query, key))); });
  }
  if (problem.mask.data != nullptr) {
    const PlaneElements<std::uint8_t> mask(problem.mask, w, head, i, j);
    visit_existing([&](float& score, int query, int key) {
      if (mask.at(query, key) == 0) score = -INFINITY;
    });
  }
}

// For large rows (docs/glossary.md): the scores of two queries and two keys become relative to their row's largest
// score, and so does `base`. at: where the first query's largest score is.
__device__ __forceinline__ void take_large_rows(const float* at, float2& base, float (&x)[4]) {
  using namespace any::attention_bwd_rows;
  if (is_large_row(base.x)) {
    x[0] -= at[0], x[2] -= at[0];
    base.x = log2_sum_of_large_row(base.x);
  }
  if (is_large_row(base.y)) {
    x[1] -= at[1], x[3] -= at[1];
    base.y = log2_sum_of_large_row(base.y);
  }
}

// The logit, in log2 units, of a product that is not masked (-inf), under a softcap; and its derivative.
__device__ __forceinline__ float cap_softly(const Params& p, float x, float& derivative) {
  const float tanh = 1.0f - __fdividef(2.0f, ptx::exp2_approx(x * p.softcap_inside) + 1.0f);
  derivative = fmaf(-tanh, tanh, 1.0f);
  return x == -INFINITY ? x : p.softcap_log2 * tanh;
}

}  // namespace heddle::cuda::sm90::attention_bwd
