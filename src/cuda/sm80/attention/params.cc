#include "cuda/sm80/attention/params.h"

#include <limits>

#include "cuda/common/attention/log2.h"
#include "cuda/common/attention/window.h"
#include "problem/philox.h"

namespace heddle::cuda::sm80::attention {
namespace {

// Columns 2 n and 2 n + 1 of every row lie side by side, aligned to both.
bool in_pairs(const Plane& x) {
  return x.alignment >= 2 * size_of(x.dtype) && x.stride_j == 1 && x.stride_b % 2 == 0 && x.stride_h % 2 == 0 &&
         x.stride_i % 2 == 0;
}

}  // namespace

bool has_gaps(const AttentionProblem& p) {
  const Window window = window_of(p);
  return p.q_step > std::int64_t{window.left} + window.right + 1;
}

bool plain_scores(const AttentionProblem& p) {
  return p.scale >= std::numeric_limits<float>::min() && p.softcap == 0 && !p.alibi && !p.bias && !p.mask &&
         p.dropout.p == 0 && !has_gaps(p);
}

Params score_params(const AttentionProblem& p) {
  Params params{};
  params.problem = p;
  params.heads = Divisor(static_cast<unsigned>(p.H));
  params.group = Divisor(static_cast<unsigned>(p.G));
  const Window window = window_of(p);
  params.left = window.left;
  params.right = window.right;
  params.row_step = static_cast<int>(p.q_step);
  params.key_step = Divisor(static_cast<unsigned>(p.key_step));
  params.stepped = p.stepped();
  params.gaps = has_gaps(p);
  params.scale_log2 = p.scale * kLog2e;
  params.bias_pairs = in_pairs(p.bias);
  params.mask_pairs = in_pairs(p.mask);
  params.drop_below = dropout_threshold(p.dropout.p);
  return params;
}

}  // namespace heddle::cuda::sm80::attention
