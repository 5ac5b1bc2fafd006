#include "ops/attention_choice.h"

#include "cpu/attention.h"
#include "reference/attention.h"

namespace heddle {
namespace {

// Calls of up to so many queries a sequence are decode, and may be chosen for by their batch.
constexpr std::int64_t kMostDecodeQueries = 16;

// Two candidates give a row different bits, so where these may not depend on the row's neighbours the choice does not
// either: the batch is one that keeps any GPU busy, and packed sequences have one length, whatever the longest has.
template <class Problem>
Problem in_a_large_batch(const Problem& problem) {
  constexpr std::int64_t kBatch = 1024, kPackedLength = 4096;
  Problem p = problem;
  p.B = kBatch;
  if (p.cu_seqlens_q && p.Sq > 0) p.Sq = kPackedLength;
  if (p.cu_seqlens_k && p.Sk > 0) p.Sk = kPackedLength;
  return p;
}

}  // namespace

std::span<const AttentionForwardKernel* const> Operation<AttentionProblem>::candidates() {
  static const auto kernels = with_gpu_kernels<AttentionProblem>(
      {&cpu::kAttentionForward, &cpu::kAttentionForwardBaseline, &reference::kAttentionForward});
  return kernels;
}

std::span<const AttentionBackwardKernel* const> Operation<AttentionBackwardProblem>::candidates() {
  static const auto kernels =
      with_gpu_kernels<AttentionBackwardProblem>({&cpu::kAttentionBackward, &reference::kAttentionBackward});
  return kernels;
}

Refusal Operation<AttentionProblem>::missing(unsigned extras, const AttentionProblem& p) {
  const auto lacks = [&](Extra extra) { return (extras & extra) == 0; };
  if (p.k.dtype == DType::f8e4m3 && lacks(kE4m3)) return "it does not read float8_e4m3fn";
  if (p.int4 && lacks(kInt4)) return "it does not read a cache in 4 bits";
  if (p.draft_mask && lacks(kDraftMask)) return "it has no draft_mask";
  if (p.append && lacks(kAppend)) return "it does not append keys";
  if (p.precision == Precision::int8_qk && lacks(kInt8Qk)) return "it does not multiply q and k in 8 bits (int8_qk)";
  return "";
}

bool sees_batch(const AttentionProblem& p) { return p.Sq <= kMostDecodeQueries && !p.batch_invariant; }

AttentionProblem as_compared(const AttentionProblem& problem) { return in_a_large_batch(problem); }
AttentionBackwardProblem as_compared(const AttentionBackwardProblem& problem) { return in_a_large_batch(problem); }

}  // namespace heddle
