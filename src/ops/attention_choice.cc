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

// What forward and backward have in common.
Refusal missing_of_pieces(unsigned extras, const AttentionProblem& p) {
  if (p.piece() && (extras & kPiece) == 0) return "it has no q_offset and key_offset";
  if (p.float32_out && p.dtype != DType::f32 && (extras & kFloat32Out) == 0) {
    return text("it does not take o in float32 beside q of ", name_of(p.dtype));
  }
  return "";
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
  if (Refusal reason = missing_of_pieces(extras, p); !reason.empty()) return reason;
  if (p.k.dtype == DType::f8e4m3 && lacks(kE4m3)) return "it does not read float8_e4m3fn";
  if (p.int4 && lacks(kInt4)) return "it does not read a cache in 4 bits";
  if (p.draft_mask && lacks(kDraftMask)) return "it has no draft_mask";
  if (p.append && lacks(kAppend)) return "it does not append keys";
  if (p.precision == Precision::int8_qk && lacks(kInt8Qk)) return "it does not multiply q and k in 8 bits (int8_qk)";
  return "";
}

Refusal Operation<AttentionBackwardProblem>::missing(unsigned extras, const AttentionBackwardProblem& p) {
  if (Refusal reason = missing_of_pieces(extras, p); !reason.empty()) return reason;
  if (p.merged && (extras & kPiece) == 0) return "it has no backward of a piece whose o and lse are merged";
  if ((extras & kFloat32Gradients) != 0) return "";
  if (p.accumulate) return "it does not add to dq, dk and dv";
  for (const Operand* gradient : {&p.dq, &p.dk, &p.dv}) {
    if (*gradient && gradient->dtype != p.dtype) {
      return text("it does not write gradients in float32 beside q of ", name_of(p.dtype));
    }
  }
  return "";
}

bool sees_batch(const AttentionProblem& p) { return p.Sq <= kMostDecodeQueries && !p.batch_invariant; }

AttentionProblem as_compared(const AttentionProblem& problem) { return in_a_large_batch(problem); }
AttentionBackwardProblem as_compared(const AttentionBackwardProblem& problem) { return in_a_large_batch(problem); }

}  // namespace heddle
