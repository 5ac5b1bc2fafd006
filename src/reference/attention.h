// The yardstick: exact attention in plain loops with double accumulators, every option of include/heddle/attention.h,
// forward and backward. All other kernels are judged by it, so nobody may optimise it: a reader must be able to check
// each line against the formulas. It allocates its own memory and may be hundreds of times slower than a kernel.
#pragma once

#include <vector>

#include "problem/attention.h"
#include "problem/sparse.h"

namespace heddle::reference {

// Contiguous, in the operands' natural order. Rows beyond a sequence's used length hold o = 0 and lse = -inf.
struct Forward {
  std::vector<double> o;    // [B, Sq, H, Dv], packed [total_q, H, Dv]
  std::vector<double> lse;  // [B, H, Sq], packed [H, total_q]
};

// Gradients, contiguous. dbias and dsink are empty unless the problem asks for them.
struct Backward {
  std::vector<double> dq;     // [B, Sq, H, D], packed [total_q, H, D]
  std::vector<double> dk;     // [B, Sk, Hkv, D], packed [total_k, Hkv, D]
  std::vector<double> dv;     // [B, Sk, Hkv, Dv], packed [total_k, Hkv, Dv]
  std::vector<double> dbias;  // [bias_batch, bias_heads, bias_rows, bias_columns]
  std::vector<double> dsink;  // [H]
};

// The results before they are rounded to the problem's dtypes. They do not depend on the executor. attention_backward
// computes its own probabilities in double: it does not read the problem's o and lse, but where they are merged.
Forward attention_forward(const AttentionProblem& p, Executor& executor);
Forward attention_forward(const SparseProblem& p, Executor& executor);
Backward attention_backward(const AttentionBackwardProblem& p, Executor& executor);
Backward attention_backward(const SparseBackwardProblem& p, Executor& executor);

// The same as candidates of the dispatcher, "reference": never chosen unless asked for by name.
extern const AttentionForwardKernel kAttentionForward;
extern const AttentionBackwardKernel kAttentionBackward;
extern const SparseForwardKernel kSparseAttentionForward;
extern const SparseBackwardKernel kSparseAttentionBackward;

}  // namespace heddle::reference
