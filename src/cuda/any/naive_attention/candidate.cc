// The candidate "naive_cuda": what it takes, and the launch.
#include <limits>

#include "core/check.h"
#include "cuda/any/naive_attention/launch.h"
#include "cuda/common/cost.h"
#include "problem/attended_pairs.h"
#include "cuda/common/requirements.h"
#include "cuda/kernels.h"
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

double estimate(const AttentionProblem& p, int /*workers*/) {
  const double flops = 2.0 * static_cast<double>(p.D + p.Dv) * attended_pairs(p) * static_cast<double>(p.B * p.H);
  const Cost& cost = cost_of("naive_cuda");
  return cost.fixed + flops / cost.flops;
}

std::size_t workspace(const AttentionProblem&, int /*workers*/) { return 0; }

void launch(const AttentionProblem& p, const Runtime& runtime) {
  if (p.B == 0 || p.Sq == 0) return;
  const Params params{p, dropout_threshold(p.dropout.p)};
  const auto start = p.o.dtype == DType::f32 ? launch_f32 : p.o.dtype == DType::f16 ? launch_f16 : launch_bf16;
  start(params, static_cast<cudaStream_t>(runtime.stream));
}

}  // namespace

const AttentionForwardKernel kNaiveAttentionForward = {
    .name = "naive_cuda",
    .method = "naive",
    .device = Device::cuda,
    .automatic = false,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .extras = kE4m3 | kDraftMask,
};

}  // namespace heddle::cuda
