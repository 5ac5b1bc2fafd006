// The candidate "naive_cuda": what it takes, and the launch.
#include <limits>

#include "core/check.h"
#include "cuda/any/naive_attention/variants.h"
#include "cuda/any/operand_dtype.h"
#include "cuda/common/requirements.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "problem/attended_pairs.h"
#include "problem/philox.h"

namespace heddle::cuda {
namespace {

using namespace any::naive_attention;

Refusal supports(const AttentionProblem& p) {
  if (Refusal reason = refuse_before_ampere(); !reason.empty()) return reason;
  constexpr std::int64_t kMaxBlocks = std::numeric_limits<std::int32_t>::max();
  if (p.Sq > 0 && p.B * p.H > kMaxBlocks / p.Sq) return text("q has more rows, all heads counted, than ", kMaxBlocks);
  return "";
}

constexpr CostLine<AttentionProblem> kCosts[] = {
    {"naive_cuda", {14.0e-6, 0.569e12, 0}, {DType::bf16, DType::bf16, Precision::f32, 1, 16, 16, 1024, 1024, 128}},
};

double estimate(const AttentionProblem& p, int /*workers*/) {
  const double flops = 2.0 * static_cast<double>(p.D + p.Dv) * attended_pairs(p) * static_cast<double>(p.B * p.H);
  const Cost& cost = cost_of(kCosts[0]);
  return cost.fixed + flops / cost.flops;
}

std::size_t workspace(const AttentionProblem&, int /*workers*/) { return 0; }

std::string describe(const AttentionProblem&, int /*workers*/) {
  return "a row of scores at a time, element by element";
}

void launch(const AttentionProblem& p, const Runtime& runtime) {
  if (p.B == 0 || p.Sq == 0) return;
  const Params params{p, dropout_threshold(p.dropout.p)};
  variants(any::operand_dtype(p)).front().launch(params, static_cast<cudaStream_t>(runtime.stream));
}

}  // namespace

std::span<const Variant> any::naive_attention::variants(DType type) {
  return variants_of<Instance, kTypes, kVariants>(type);
}

const AttentionForwardKernel kNaiveAttentionForward = {
    .name = "naive_cuda",
    .method = "naive",
    .device = Device::cuda,
    .automatic = false,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe,
    .extras = kE4m3 | kDraftMask | kPiece | kFloat32Out,
    .costs = kCosts,
};

}  // namespace heddle::cuda
