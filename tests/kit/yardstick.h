// The plain, unfused computation in the operands' dtype, whose error sets the bound for every kernel.
//
// For 16-bit operands: S = scale * Q K^T with softcap, ALiBi and bias is rounded to the dtype; softmax runs in f32; P
// is rounded; O = P V is summed in f32 and rounded. Backward likewise: dP, dS and the tanh of the softcap are rounded,
// the gradients are summed in f32 and rounded once. lse and dsink are f32 throughout. For f32 operands all is done in
// f32; under Precision::tf32 q, k, v, P, dO and dS are rounded to 11 significant bits before they are multiplied. For
// f8e4m3 operands (forward only), scores stay in f32, P is rounded as f8e4m3 after a multiplication with 2^8, and O is
// rounded to its own dtype. Under Precision::int8_qk (forward only) q and k are quantised as quantized_heads.h says,
// scores stay in f32, and P and O are rounded to the dtype.
#pragma once

#include <vector>

#include "core/attention_problem.h"

namespace heddle::kit {

// One output tensor, contiguous in natural order, as reference::Forward and reference::Backward.
struct PlainTensor {
  std::vector<double> values;
  double terms = 0;   // largest sum of |terms| of an element, weighted by the condition of its scores; see floor_of()
  double delta = 0;   // largest root of the sum of squares that rounding O inside delta = dO . O adds to an element
  bool tf32 = false;  // operands of the products were rounded to tf32
};

struct PlainForward {
  PlainTensor o, lse;
};
// smooth_keys = false: a mistake under Precision::int8_qk, for tests of the rule.
PlainForward plain_forward(const AttentionProblem& p, bool smooth_keys = true);

struct PlainBackward {
  PlainTensor dq, dk, dv, dbias, dsink;  // dbias, dsink: empty unless the problem asks for them
};
PlainBackward plain_backward(const AttentionBackwardProblem& p);

}  // namespace heddle::kit
