// The plain computation in the operands' dtype, whose error sets the bound for every kernel.
//
// It is done four times, in the orders of ordered_sums.h, each with what goes with it in real programs: forward and
// lanes compute as unfused programs do, P = exp(S - max) / sum and then P V; backward and blocks as fused ones do,
// powers of two, P V before the division. In f32, forward adds products without rounding them (FMA), and backward and
// lanes multiply q, not scores, with the scale.
//
// What is rounded to 16-bit operands' dtype: P, dS, o and the gradients, as operands of products and results. Scores,
// the softmax, dP, lse and dsink stay in f32, as in every kernel here: scores in the hundreds rounded to 8 bits would
// leave nothing of P, and a rule that was found from them could not fail. A backward takes P from lse and delta = dO .
// o from o, both as its caller gave them: the reference's, rounded.
//
// blocks adds up as tensor cores do where operands are those of tensor cores: 16-bit operands in steps of 16 products
// with 24 bits, tf32 in steps of 8, e4m3 in steps of 32 products with 13 bits, as Hopper's do.
//
// f32 operands under Precision::tf32: q, k, v, P, dO and dS are rounded to 11 significant bits before they are
// multiplied; fused, cut off as sm80 does, which is off by up to 2/3 of the last place. f8e4m3 operands (forward only):
// P is rounded as f8e4m3 after a multiplication with 2^8 (fused: with v's scales over the largest of 128 keys), and O
// to its own dtype. Under Precision::int8_qk (forward only) q and k are quantised as quantized_heads.h says.
#pragma once

#include "kit/compare.h"
#include "kit/plain_rows.h"
#include "problem/attention.h"
#include "reference/attention.h"

namespace heddle::kit {

// How many times e the tensors of a case may be off; exact: what the reference's forward gives.
double allowed_factor(const AttentionProblem& p, const reference::Forward& exact);

// Each tensor contiguous in natural order, as reference::Forward and reference::Backward. rounds_int4_query: also as a
// kernel does that multiplies q with the scales of keys in 4 bits and rounds the product to f16.
struct PlainForward {
  PlainTensor o, lse;
};
PlainForward plain_forward(const AttentionProblem& p, Fault fault = Fault::none, bool rounds_int4_query = false);

struct PlainBackward {
  PlainTensor dq, dk, dv, dbias, dsink;  // dbias, dsink: empty unless the problem asks for them
};
PlainBackward plain_backward(const AttentionBackwardProblem& p, const reference::Forward& exact,
                             Fault fault = Fault::none);

}  // namespace heddle::kit
