// The online softmax: running maxima of logits as they are kept (scores-inl.h), and sums, of rows in lanes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/rows-inl.h"
#include "cpu/scores-inl.h"
#include "cpu/simd-inl.h"
#include "problem/attention.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// Joins the maxima `top` with the running ones at `running`; leaves in `top` what to subtract, and in `alpha` the
// shrinking of old sums. to_log2: of the problem.
template <int N>
HWY_INLINE void UpdateMax(float* running, float to_log2, VF* top, VF* alpha) {
  const DF d;
  HWY_UNROLL(kTileN)
  for (int n = 0; n < N; ++n) {
    const VF before = hn::LoadU(d, running + n * kLanes);
    const VF now = hn::Max(before, top[n]);
    hn::StoreU(now, d, running + n * kLanes);
    // A row without a key so far has maximum -inf; subtract 0 there, so that its exponentials are 0 and not NaN.
    top[n] = hn::IfThenElse(hn::Eq(now, hn::Set(d, -kInfinity)), hn::Zero(d), now);
    alpha[n] = Exp2(hn::Mul(hn::Sub(before, top[n]), hn::Set(d, to_log2)));
  }
}

// scores[key][lane] -> exp2(power(score, max)), added to the running sums shrunk by alpha.
template <int N, class Power>
HWY_INLINE void ExponentiateAs(const Power& power, float* HWY_RESTRICT scores, std::int64_t count, const VF* max,
                               const VF* alpha, float* HWY_RESTRICT sums) {
  const DF d;
  VF sum[N];
  HWY_UNROLL(kTileN)
  for (int n = 0; n < N; ++n) sum[n] = hn::Zero(d);
  for (std::int64_t j = 0; j < count; ++j) {
    HWY_UNROLL(kTileN)
    for (int n = 0; n < N; ++n) {
      float* x = scores + j * kGroup + n * kLanes;
      const VF e = Exp2(power(hn::LoadU(d, x), max[n]));
      sum[n] = hn::Add(sum[n], e);
      hn::StoreU(e, d, x);
    }
  }
  HWY_UNROLL(kTileN)
  for (int n = 0; n < N; ++n) {
    hn::StoreU(hn::MulAdd(hn::LoadU(d, sums + n * kLanes), alpha[n], sum[n]), d, sums + n * kLanes);
  }
}

// scores[key][lane] -> probabilities relative to max. raw: scores are products yet, to be scaled on the way.
template <int N>
HWY_INLINE void Exponentiate(const AttentionProblem& p, bool raw, float* HWY_RESTRICT scores, std::int64_t count,
                             const VF* max, const VF* alpha, float* HWY_RESTRICT sums) {
  const DF d;
  if (natural_logits(p)) {
    const VF log2e = hn::Set(d, kLog2e);
    const auto power = [&](VF x, VF top) HWY_ATTR { return hn::Mul(hn::Sub(x, top), log2e); };
    ExponentiateAs<N>(power, scores, count, max, alpha, sums);
  } else {
    const VF factor = hn::Set(d, raw ? p.scale * kLog2e : 1.0f);
    const auto power = [&](VF x, VF top) HWY_ATTR { return hn::MulSub(x, factor, top); };
    ExponentiateAs<N>(power, scores, count, max, alpha, sums);
  }
}

// Dropout of the probabilities, which the running sums have counted already. factors: count * kGroup f32.
template <int N>
void ApplyDropout(const Head& head, const GroupRows& g, std::int64_t begin, std::int64_t count,
                  float* HWY_RESTRICT scores, float* HWY_RESTRICT factors) {
  if (head.p.dropout.p == 0) return;
  const DF d;
  DropoutFactors(head, g, begin, count, factors);
  for (std::int64_t j = 0; j < count; ++j) {
    for (int n = 0; n < N; ++n) {
      float* x = scores + j * kGroup + n * kLanes;
      hn::StoreU(hn::Mul(hn::LoadU(d, x), hn::LoadU(d, factors + j * kGroup + n * kLanes)), d, x);
    }
  }
}

// One vector of maxima and sums takes in those of later keys; a_weight and b_weight are what their outputs count.
HWY_INLINE void MergeStatistics(float to_log2, float* a_max, float* a_sum, const float* b_max, const float* b_sum,
                                VF& a_weight, VF& b_weight) {
  const DF d;
  const VF am = hn::LoadU(d, a_max), bm = hn::LoadU(d, b_max);
  const VF max = hn::Max(am, bm);
  const VF base = hn::IfThenElse(hn::Eq(max, hn::Set(d, -kInfinity)), hn::Zero(d), max);
  a_weight = Exp2(hn::Mul(hn::Sub(am, base), hn::Set(d, to_log2)));
  b_weight = Exp2(hn::Mul(hn::Sub(bm, base), hn::Set(d, to_log2)));
  hn::StoreU(max, d, a_max);
  hn::StoreU(hn::MulAdd(hn::LoadU(d, a_sum), a_weight, hn::Mul(hn::LoadU(d, b_sum), b_weight)), d, a_sum);
}

// Ends a row: its sink joins, lse is written, and the factor that normalises its output is returned. In double, which
// holds what is added to the largest floats.
inline float FinishRow(const Head& head, const Row& row, float max, float sum) {
  const AttentionProblem& p = head.p;
  double top = natural_logits(p) ? max : max * kLn2, total = sum, shrink = 1.0;
  if (p.sink && row.i < head.s.sq) {
    const double sink = p.sink.as<const float>()[row.h * p.sink.stride_h], with_sink = std::max(top, sink);
    if (with_sink > -kInfinity) {
      shrink = std::exp(top - with_sink);
      total = total * shrink + std::exp(sink - with_sink);
      top = with_sink;
    }
  }
  if (p.lse) {
    p.lse.as<float>()[p.lse.offset(head.b, row.h, head.s.q_begin + row.i)] =
        total == 0.0 ? -kInfinity : static_cast<float>(top + std::log(total));
  }
  return total == 0.0 ? 0.0f : static_cast<float>(shrink / total);
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
