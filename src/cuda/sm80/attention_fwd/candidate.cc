// The candidate "sm80": what it takes, which instantiation, and the launch.
#include <algorithm>
#include <limits>

#include "core/check.h"
#include "cuda/common/requirements.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "cuda/sm80/attention_fwd/launch.h"

namespace heddle::cuda {
namespace {

using namespace sm80::attention_fwd;

std::int64_t elements_of_16_bytes(const AttentionProblem& p) {
  return 16 / static_cast<std::int64_t>(size_of(p.dtype));
}

const Variants& variants_for(const AttentionProblem& p) {
  const int products = sm80::attention::products_of(p);
  return first_that(variants(p.dtype), [&](const Variants& v) {
    return !v.int8_qk && v.products == products && std::max(p.D, p.Dv) <= v.head;
  });
}

const Variant& variant_for(const AttentionProblem& p) {
  const Variants& variants = variants_for(p);
  const std::int64_t piece = elements_of_16_bytes(p);
  if (p.D % piece != 0 || p.Dv % piece != 0 || !has_rows_of_16_bytes(p.q) || !has_rows_of_16_bytes(p.k) ||
      !has_rows_of_16_bytes(p.v)) {
    return variants.strided;
  }
  return sm80::attention::plain_scores(p) ? variants.plain : variants.options;
}

Refusal supports(const AttentionProblem& p) {
  if (Refusal reason = refuse_before_ampere(); !reason.empty()) return reason;
  if (p.Sq > kMaxLength || p.Sk > kMaxLength) return text("sequences must be no longer than ", kMaxLength);
  if (p.piece()) {
    if (p.dropout.p > 0) return "it has no dropout beside q_offset and key_offset";
    if (std::max({p.Sq * p.q_step, p.Sk * p.key_step, p.window_left, p.window_right}) > kMaxPiece) {
      return text("sequences and windows must be no longer than ", kMaxPiece,
                  " positions beside q_offset and key_offset");
    }
  }
  if (p.B * p.H > kMaxTiles / std::max<std::int64_t>(q_tiles(p, variant_for(p)), 1)) {
    return text("q has more tiles of ", variant_for(p).tile_q, " rows than 2^30");
  }
  return "";
}

constexpr CostLine<AttentionProblem> kCosts[] = {
    {"sm80 d64", {6.0e-6, 345e12, 0}, {DType::bf16, DType::bf16, Precision::f32, 4, 32, 32, 4096, 4096, 64}},
    {"sm80 d128", {5.9e-6, 393e12, 0}, {DType::bf16, DType::bf16, Precision::f32, 4, 16, 16, 4096, 4096, 128}},
    {"sm80 d256", {5.9e-6, 346e12, 0}, {DType::bf16, DType::bf16, Precision::f32, 4, 8, 8, 4096, 4096, 256}},
    {"sm80 f32", {9.5e-6, 65.3e12, 0}, {DType::f32, DType::f32, Precision::f32, 2, 16, 16, 4096, 4096, 128}},
    {"sm80 tf32", {7.0e-6, 157e12, 0}, {DType::f32, DType::f32, Precision::tf32, 2, 16, 16, 4096, 4096, 128}},
};

double estimate(const AttentionProblem& p, int /*workers*/) {
  const std::int64_t size = std::max(p.D, p.Dv);
  const Cost& cost = cost_of(kCosts[p.dtype == DType::f32 ? sm80::attention::uses_tf32(p) ? 4 : 3
                                    : size <= 64          ? 0
                                    : size <= 128         ? 1
                                                          : 2]);
  const Variant& v = variant_for(p);
  return tiles_seconds(p, cost, cost_of(kSm80AttentionDecode.costs.front()),
                       static_cast<double>(p.B * p.H * q_tiles(p, v)), v.tile_q);
}

std::size_t workspace(const AttentionProblem&, int /*workers*/) { return 0; }

std::string describe(const AttentionProblem& p, int /*workers*/) {
  const Variants& variants = variants_for(p);
  const Variant& v = variant_for(p);
  return text(variants.name, ": tiles of ", v.tile_q, " rows, ",
              &v == &variants.plain     ? "without score options"
              : &v == &variants.options ? "with all score options"
                                        : "rows element by element",
              sm80::attention::uses_tf32(p) ? ", products in tf32"
              : p.dtype == DType::f32       ? ", products in three of tf32"
                                            : "",
              ", ", p.B * p.H * q_tiles(p, v), " tiles");
}

void launch(const AttentionProblem& p, const Runtime& runtime) {
  if (p.B == 0 || p.Sq == 0) return;
  const Variant& v = variant_for(p);
  v.launch(params_for(p, v), static_cast<cudaStream_t>(runtime.stream));
}

}  // namespace

std::span<const Variants> sm80::attention_fwd::variants(DType type) {
  return type == DType::f32 ? variants_of<Instance, kF32Types, kF32Variants>(type)
                            : variants_of<Instance, k16BitTypes, k16BitVariants>(type);
}

const AttentionForwardKernel kSm80AttentionForward = {
    .name = "sm80",
    .method = "flash",
    .device = Device::cuda,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe,
    .extras = kPiece | kFloat32Out | kSteps,
    .costs = kCosts,
};

}  // namespace heddle::cuda
