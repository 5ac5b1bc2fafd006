// Second kernel: each row of S becomes P, normalised, with dropout; and lse. A row a warp, four keys a lane.
#pragma once

#include "cuda/any/attention_baseline/params.h"
#include "cuda/any/bounded_piece.h"
#include "cuda/any/options.cuh"

namespace heddle::cuda::any::attention_baseline {

// Maximum of logits, and the sum of exponentials relative to it.
struct Sum {
  float maximum = -INFINITY, sum = 0.0f;
  __device__ void merge(float other_maximum, float other_sum) {
    const float top = fmaxf(maximum, other_maximum), base = base_of(top);
    sum = sum * expf(maximum - base) + other_sum * expf(other_maximum - base);
    maximum = top;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads) softmax_kernel(const __grid_constant__ Params params) {
  const AttentionProblem& p = params.problem;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t row = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32, unit = row / p.Sq;
  const std::int64_t i = row - unit * p.Sq, b = unit / p.H, h = unit - b * p.H;
  if (b >= p.B) return;
  const Sequence s = bounded_piece(p, b, true);
  if (i >= s.q_rows) return;
  if (i >= s.sq) {
    if (lane == 0) store_lse(p, s, b, h, i, 0.0f, 0.0f);
    return;
  }
  // Quads of keys that hold some of the row's; the others in them are -inf.
  const auto keys = p.key_range(s, i);
  const std::int64_t begin = keys.begin / 4 * 4 + 4 * lane;
  float* const scores = params.row(b, h, i);

  Sum all;
#pragma unroll 4
  for (std::int64_t j = begin; j < keys.end; j += 128) {
    const float4 x = *reinterpret_cast<const float4*>(scores + j);
    const float maximum = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), base = base_of(maximum);
    all.merge(maximum, expf(x.x - base) + expf(x.y - base) + expf(x.z - base) + expf(x.w - base));
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const float maximum = __shfl_xor_sync(0xffffffff, all.maximum, lanes);
    all.merge(maximum, __shfl_xor_sync(0xffffffff, all.sum, lanes));
  }
  const float sink = sink_of(p, h);
  if (sink != -INFINITY) all.merge(sink, 1.0f);
  const float base = base_of(all.maximum), inverse = all.sum == 0.0f ? 0.0f : 1.0f / all.sum;
  if (lane == 0) store_lse(p, s, b, h, i, base, all.sum);

#pragma unroll 4
  for (std::int64_t j = begin; j < keys.end; j += 128) {
    float4 x = *reinterpret_cast<const float4*>(scores + j);
    const auto probability = [&](float score, int n) {
      return expf(score - base) * inverse * dropout_factor(p, params.drop_below, s, b, h, i, j + n);
    };
    x = make_float4(probability(x.x, 0), probability(x.y, 1), probability(x.z, 2), probability(x.w, 3));
    *reinterpret_cast<float4*>(scores + j) = x;
  }
}

}  // namespace heddle::cuda::any::attention_baseline
