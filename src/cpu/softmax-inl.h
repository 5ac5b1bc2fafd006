// The online softmax in the log2 domain: running maxima and sums of rows in lanes.

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// Joins the maxima `top` with the running ones at `running`; leaves in `top` what to subtract, and in `alpha` the
// shrinking of old sums.
template <int N>
HWY_INLINE void UpdateMax(float* running, VF* top, VF* alpha) {
  const DF d;
  HWY_UNROLL(kTileN)
  for (int n = 0; n < N; ++n) {
    const VF before = hn::LoadU(d, running + n * kLanes);
    const VF now = hn::Max(before, top[n]);
    hn::StoreU(now, d, running + n * kLanes);
    // A row without a key so far has maximum -inf; subtract 0 there, so that its exponentials are 0 and not NaN.
    top[n] = hn::IfThenElse(hn::Eq(now, hn::Set(d, -kInfinity)), hn::Zero(d), now);
    alpha[n] = Exp2(hn::Sub(before, top[n]));
  }
}

// scores[key][lane] -> exp2(scores * factor - max), added to the running sums shrunk by alpha.
template <int N>
HWY_INLINE void Exponentiate(float* HWY_RESTRICT scores, std::int64_t count, VF factor, const VF* max, const VF* alpha,
                             float* HWY_RESTRICT sums) {
  const DF d;
  VF sum[N];
  HWY_UNROLL(kTileN)
  for (int n = 0; n < N; ++n) sum[n] = hn::Mul(hn::LoadU(d, sums + n * kLanes), alpha[n]);
  for (std::int64_t j = 0; j < count; ++j) {
    HWY_UNROLL(kTileN)
    for (int n = 0; n < N; ++n) {
      float* x = scores + j * kGroup + n * kLanes;
      const VF e = Exp2(hn::MulSub(hn::LoadU(d, x), factor, max[n]));
      sum[n] = hn::Add(sum[n], e);
      hn::StoreU(e, d, x);
    }
  }
  HWY_UNROLL(kTileN)
  for (int n = 0; n < N; ++n) hn::StoreU(sum[n], d, sums + n * kLanes);
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
HWY_INLINE void MergeStatistics(float* a_max, float* a_sum, const float* b_max, const float* b_sum, VF& a_weight,
                                VF& b_weight) {
  const DF d;
  const VF am = hn::LoadU(d, a_max), bm = hn::LoadU(d, b_max);
  const VF max = hn::Max(am, bm);
  const VF base = hn::IfThenElse(hn::Eq(max, hn::Set(d, -kInfinity)), hn::Zero(d), max);
  a_weight = Exp2(hn::Sub(am, base));
  b_weight = Exp2(hn::Sub(bm, base));
  hn::StoreU(max, d, a_max);
  hn::StoreU(hn::MulAdd(hn::LoadU(d, a_sum), a_weight, hn::Mul(hn::LoadU(d, b_sum), b_weight)), d, a_sum);
}

// Ends a row: its sink joins, lse is written, and the factor that normalises its output is returned.
inline float FinishRow(const Head& head, const Row& row, float max, float sum) {
  const AttentionProblem& p = head.p;
  float factor = 1.0f;
  if (p.sink && row.i < head.s.sq) {
    const float sink = p.sink.as<const float>()[row.h * p.sink.stride_h] * kLog2e;
    const float top = std::max(max, sink);
    if (top > -kInfinity) {
      factor = std::exp2(max - top);
      sum = sum * factor + std::exp2(sink - top);
      max = top;
    }
  }
  if (p.lse) {
    const double lse = (max + std::log2(static_cast<double>(sum))) * 0.693147180559945309417;
    p.lse.as<float>()[p.lse.offset(head.b, row.h, head.s.q_begin + row.i)] =
        sum == 0.0f ? -kInfinity : static_cast<float>(lse);
  }
  return sum == 0.0f ? 0.0f : factor / sum;
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
