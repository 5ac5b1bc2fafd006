// The candidate "sm90_fp8": what it takes, which instantiation, and the launch.
#include <algorithm>

#include "core/check.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "cuda/sm90/attention/tiles.h"
#include "cuda/sm90/attention_fwd_fp8/launch.h"
#include "problem/attended_pairs.h"

namespace heddle::cuda {
namespace {

using namespace sm90::attention_fwd_fp8;
using sm90::attention::make_plan;
using sm90::attention::Plan;

Refusal supports(const AttentionProblem& p) {
  if (Refusal reason = refuse_other_than_hopper(); !reason.empty()) return reason;
  if (p.q.dtype != DType::f8e4m3 || p.k.dtype != DType::f8e4m3) return "it takes q, k and v of float8_e4m3fn only";
  if (p.D % 8 != 0 || p.Dv % 8 != 0) return text("head sizes must be multiples of 8; found ", p.D, " and ", p.Dv);
  if (p.D > 128 || p.Dv > 128) return text("head sizes must be at most 128; found ", p.D, " and ", p.Dv);
  if (Refusal reason = sm90::attention::refuse_layout(p); !reason.empty()) return reason;
  if (p.softcap != 0) return "it has no softcap";
  if (p.alibi) return "it has no ALiBi";
  // Which heads share a tile depends on the longest sequence, and a row's guessed maximum on its tile.
  if (p.batch_invariant && p.cu_seqlens_q) return "bits of its packed sequences may depend on the batch";
  if (p.bias) return "it has no bias";
  if (p.mask) return "it has no mask";
  if (p.dropout.p != 0) return "it has no dropout";
  if (p.page_table || p.cache_batch_idx || p.cache_leftpad) return "it has no cached keys";
  return "";
}

const Variant& variant_for(const AttentionProblem& p) {
  const bool token_scales = p.k_scale.stride_s != 0 || p.v_scale.stride_s != 0;
  // Whoever only asks gives no output; the tiles are the same.
  return first_that(variants(p.o.dtype == DType::bf16 ? DType::bf16 : DType::f16), [&](const Variant& v) {
    return v.tiles.token_scales == token_scales && std::max(p.D, p.Dv) <= v.tiles.head;
  });
}

constexpr CostLine<AttentionProblem> kCosts[] = {
    {"sm90_fp8 d64", {6.2e-6, 537e12, 0}, {DType::f8e4m3, DType::f8e4m3, Precision::f32, 4, 32, 32, 4096, 4096, 64}},
    {"sm90_fp8 d128", {6.5e-6, 879e12, 0}, {DType::f8e4m3, DType::f8e4m3, Precision::f32, 4, 16, 16, 4096, 4096, 128}},
};

double estimate(const AttentionProblem& p, int /*workers*/) {
  const double flops = 2.0 * static_cast<double>(p.D + p.Dv) * attended_pairs(p) * static_cast<double>(p.B * p.H);
  const Cost& cost = cost_of(kCosts[std::max(p.D, p.Dv) <= 64 ? 0 : 1]);
  return cost.fixed + flops / cost.flops;
}

std::size_t workspace(const AttentionProblem& p, int /*workers*/) {
  return make_plan(p, variant_for(p).consumers).dynamic ? sizeof(int) : 0;
}

std::string describe(const AttentionProblem& p, int /*workers*/) {
  const Variant& v = variant_for(p);
  const Plan plan = make_plan(p, v.consumers);
  return text(v.name, ": tiles of ", sm90::attention::kRows * v.consumers, " rows x ", v.tile_k, " keys",
              p.k_scale.stride_s != 0 || p.v_scale.stride_s != 0 ? ", scales by token" : "",
              plan.pack > 1 ? text(", ", plan.pack, " heads in a tile") : "", ", ", p.B * plan.units * plan.q_tiles,
              " tiles on ", current_device().multiprocessors, " multiprocessors",
              plan.dynamic ? ", dealt out as they run" : "");
}

void launch(const AttentionProblem& p, const Runtime& runtime) {
  if (p.B == 0 || p.q_rows == 0) return;
  const Variant& v = variant_for(p);
  const Plan plan = make_plan(p, v.consumers);
  const auto stream = static_cast<cudaStream_t>(runtime.stream);
  Params params = params_for(p, plan, v.tile_k);
  if (plan.dynamic) params.next_tile = sm90::attention::new_counter(runtime.workspace.data, stream);
  v.launch(params, std::min(params.tiles, current_device().multiprocessors), stream);
}

}  // namespace

std::span<const Variant> sm90::attention_fwd_fp8::variants(DType type) {
  return variants_of<Instance, kTypes, kVariants>(type);
}

const AttentionForwardKernel kSm90AttentionForwardFp8 = {
    .name = "sm90_fp8",
    .method = "flash",
    .device = Device::cuda,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe,
    .extras = kE4m3,
    .costs = kCosts,
};

}  // namespace heddle::cuda
