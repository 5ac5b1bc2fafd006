// The candidate "sm80_int8", under Precision::int8_qk: what it takes, and its launches.
#include <algorithm>
#include <limits>

#include "core/check.h"
#include "cuda/any/attention_int8_qk/launch.h"
#include "cuda/common/requirements.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "cuda/sm80/attention_fwd/launch.h"
#include "problem/attended_pairs.h"

namespace heddle::cuda {
namespace {

using namespace sm80::attention_fwd;
namespace int8_qk = any::attention_int8_qk;

const Variants& variants_for(const AttentionProblem& p) {
  return first_that(variants(p.dtype), [&](const Variants& v) { return v.int8_qk && std::max(p.D, p.Dv) <= v.head; });
}
const Variant& variant_for(const AttentionProblem& p) { return variants_for(p).plain; }

Refusal supports(const AttentionProblem& p) {
  if (Refusal reason = refuse_before_ampere(); !reason.empty()) return reason;
  if (p.precision != Precision::int8_qk) return "it multiplies q and k in 8 bits, which precision int8_qk asks for";
  if (p.dtype != DType::f16 && p.dtype != DType::bf16) {
    return text("it takes queries in float16 and bfloat16, not ", name_of(p.dtype));
  }
  if (p.D % 8 != 0 || p.Dv % 8 != 0) return text("head sizes must be multiples of 8; found ", p.D, " and ", p.Dv);
  if (p.D > 128 || p.Dv > 128) return text("head sizes must be at most 128; found ", p.D, " and ", p.Dv);
  if (!has_rows_of_16_bytes(p.q) || !has_rows_of_16_bytes(p.k) || !has_rows_of_16_bytes(p.v)) {
    return "rows of q, k and v must be contiguous and begin at multiples of 16 bytes";
  }
  if (!(p.scale >= std::numeric_limits<float>::min())) return text("scale must be positive; found ", p.scale);
  if (p.softcap != 0) return "it has no softcap";
  if (p.alibi) return "it has no ALiBi";
  if (p.bias) return "it has no bias";
  if (p.mask) return "it has no mask";
  if (p.dropout.p != 0) return "it has no dropout";
  // Every call quantises all keys.
  if (p.page_table || p.cache_batch_idx || p.cache_leftpad) return "it has no cached keys";
  if (p.Sq > kMaxLength || p.Sk > kMaxLength) return text("sequences must be no longer than ", kMaxLength);
  if (int8_qk::blocks_to_launch(p) > kMaxTiles) return "q and k have more blocks of 64 rows than 2^30";
  return "";
}

constexpr CostLine<AttentionProblem> kCosts[] = {
    {"sm80_int8 d64", {10.2e-6, 363e12, 0}, {DType::bf16, DType::bf16, Precision::int8_qk, 4, 32, 32, 4096, 4096, 64}},
    {"sm80_int8 d128",
     {10.4e-6, 420e12, 0},
     {DType::bf16, DType::bf16, Precision::int8_qk, 4, 16, 16, 4096, 4096, 128}},
};

double estimate(const AttentionProblem& p, int /*workers*/) {
  const double flops = 2.0 * static_cast<double>(p.D + p.Dv) * attended_pairs(p) * static_cast<double>(p.B * p.H);
  const Cost& cost = cost_of(kCosts[std::max(p.D, p.Dv) <= 64 ? 0 : 1]);
  return cost.fixed + flops / cost.flops;
}

std::size_t workspace(const AttentionProblem& p, int /*workers*/) { return int8_qk::workspace_bytes(p); }

std::string describe(const AttentionProblem& p, int /*workers*/) {
  const Variant& v = variant_for(p);
  return text(variants_for(p).name, ": tiles of ", v.tile_q, " rows, ", p.B * p.H * q_tiles(p, v),
              " tiles, after a pass that makes codes of q and k");
}

void launch(const AttentionProblem& p, const Runtime& runtime) {
  if (p.B == 0 || p.Sq == 0) return;
  const auto stream = static_cast<cudaStream_t>(runtime.stream);
  const Variant& v = variant_for(p);
  Params params = params_for(p, v);
  params.codes = int8_qk::codes_in(p, runtime.workspace.data);
  int8_qk::launch(p, params.codes, stream);
  v.launch(params, stream);
}

}  // namespace

const AttentionForwardKernel kSm80AttentionForwardInt8 = {
    .name = "sm80_int8",
    .method = "flash",
    .device = Device::cuda,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe,
    .extras = kInt8Qk,
    .costs = kCosts,
};

}  // namespace heddle::cuda
