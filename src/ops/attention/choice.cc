#include "ops/attention/choice.h"

#include <cstddef>

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

// Where a piece's rows stand to its keys only the GPU knows. Few rows are taken for those of decoding, behind the keys,
// and windows for windows of keys.
void put_behind_keys(AttentionProblem& p) {
  if (p.causal != Causal::none) p.causal = Causal::bottom_right;
  if (p.window_left >= 0) p.window_left /= p.key_step;
  if (p.window_right >= 0) p.window_right /= p.key_step;
  p.q_step = p.key_step = 1;
}

// What a call asks for by a bit of Extra, and the sentence of a kernel that has not the bit.
template <class Problem>
struct Asked {
  Extra extra;
  bool (*by)(const Problem&);
  Refusal (*refusal)(const Problem&);
};

template <class Problem>
bool writes_wide_gradients(const Problem& p) {
  for (const Operand* gradient : {&p.dq, &p.dk, &p.dv}) {
    if (*gradient && gradient->dtype != p.dtype) return true;
  }
  return false;
}

using Forward = AttentionProblem;
using Backward = AttentionBackwardProblem;

constexpr Asked<Forward> kOfBoth[] = {
    {kSteps, [](const Forward& p) { return p.stepped(); },
     [](const Forward&) -> Refusal { return "it has no q_step and key_step above 1"; }},
    {kPiece, [](const Forward& p) { return p.piece(); },
     [](const Forward&) -> Refusal { return "it has no q_offset and key_offset"; }},
    {kFloat32Out, [](const Forward& p) { return p.float32_out && p.dtype != DType::f32; },
     [](const Forward& p) { return text("it does not take o in float32 beside q of ", name_of(p.dtype)); }},
};
constexpr Asked<Forward> kOfForward[] = {
    {kE4m3, [](const Forward& p) { return p.k.dtype == DType::f8e4m3; },
     [](const Forward&) -> Refusal { return "it does not read float8_e4m3fn"; }},
    {kInt4, [](const Forward& p) { return static_cast<bool>(p.int4); },
     [](const Forward&) -> Refusal { return "it does not read a cache in 4 bits"; }},
    {kDraftMask, [](const Forward& p) { return static_cast<bool>(p.draft_mask); },
     [](const Forward&) -> Refusal { return "it has no draft_mask"; }},
    {kAppend, [](const Forward& p) { return static_cast<bool>(p.append); },
     [](const Forward&) -> Refusal { return "it does not append keys"; }},
    {kInt8Qk, [](const Forward& p) { return p.precision == Precision::int8_qk; },
     [](const Forward&) -> Refusal { return "it does not multiply q and k in 8 bits (int8_qk)"; }},
};
constexpr Asked<Backward> kOfBackward[] = {
    {kPiece, [](const Backward& p) { return p.merged; },
     [](const Backward&) -> Refusal { return "it has no backward of a piece whose o and lse are merged"; }},
    {kFloat32Gradients, [](const Backward& p) { return p.accumulate; },
     [](const Backward&) -> Refusal { return "it does not add to dq, dk and dv"; }},
    {kFloat32Gradients, writes_wide_gradients<Backward>,
     [](const Backward& p) { return text("it does not write gradients in float32 beside q of ", name_of(p.dtype)); }},
};

template <class Problem, std::size_t kCount>
constexpr unsigned bits(const Asked<Problem> (&rows)[kCount]) {
  unsigned all = 0;
  for (const Asked<Problem>& row : rows) all |= row.extra;
  return all;
}
// An option whose bit no row has would run, and be ignored, on every kernel that does not know it.
constexpr unsigned kEveryExtra = 2u * kLastExtra - 1;
constexpr unsigned kAboutGradients = kFloat32Gradients;
constexpr unsigned kWithoutBackward =
    kE4m3 | kInt4 | kDraftMask | kAppend | kInt8Qk;  // refused as arguments are checked
static_assert((bits(kOfBoth) | bits(kOfForward) | kAboutGradients) == kEveryExtra,
              "a bit of Extra has no row in kOfBoth or kOfForward: kernels without it would ignore what it asks for");
static_assert((bits(kOfBoth) | bits(kOfBackward) | kWithoutBackward) == kEveryExtra,
              "a bit of Extra has no row in kOfBoth or kOfBackward, and is not one whose backward is refused "
              "(checked_backward_problem, kWithoutBackward): gradients would ignore what it asks for");

template <class Rows, class Problem>
Refusal missing_of(const Rows& rows, unsigned extras, const Problem& p) {
  for (const auto& row : rows) {
    if ((extras & row.extra) == 0 && row.by(p)) return row.refusal(p);
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
  Refusal reason = missing_of(kOfBoth, extras, p);
  return reason.empty() ? missing_of(kOfForward, extras, p) : reason;
}

Refusal Operation<AttentionBackwardProblem>::missing(unsigned extras, const AttentionBackwardProblem& p) {
  Refusal reason = missing_of(kOfBoth, extras, p);
  return reason.empty() ? missing_of(kOfBackward, extras, p) : reason;
}

bool sees_batch(const AttentionProblem& p) { return p.Sq <= kMostDecodeQueries && !p.batch_invariant; }

std::optional<AttentionProblem> as_compared(const AttentionProblem& problem) {
  if (problem.device == Device::cpu) return std::nullopt;
  const bool few_rows = problem.piece() && problem.Sq <= kMostDecodeQueries;
  if (sees_batch(problem) && !few_rows) return std::nullopt;
  AttentionProblem p = sees_batch(problem) ? problem : in_a_large_batch(problem);
  if (few_rows) put_behind_keys(p);
  return p;
}

std::optional<AttentionBackwardProblem> as_compared(const AttentionBackwardProblem& problem) {
  if (problem.device == Device::cpu) return std::nullopt;
  return in_a_large_batch(problem);
}

}  // namespace heddle
