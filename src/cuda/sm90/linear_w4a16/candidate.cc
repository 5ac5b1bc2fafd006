// The candidate "sm90_w4a16": what it takes, which tile, and the launch.
#include <algorithm>
#include <array>

#include "core/check.h"
#include "cuda/any/linear/host.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"
#include "cuda/common/tensor_map.h"
#include "cuda/kernels.h"
#include "cuda/sm90/linear_w4a16/variants.h"

namespace heddle::cuda {
namespace {

using namespace linear;
using namespace sm90::linear_w4a16;

constexpr CostLine<LinearProblem> kCosts[] = {
    {"sm90_w4a16", {3.3e-6, 780e12, 0}, {"nvfp4", WeightOrder::fragments16, DType::bf16, 4096, 8192, 8192}},
    {"sm90_w4a16 few rows", {3.3e-6, 0, 3.20e12}, {"nvfp4", WeightOrder::fragments16, DType::bf16, 16, 28672, 8192}},
};

Choice<Variant> choice(const LinearProblem& p) {
  std::array<Measured<Variant>, std::size(kVariants)> measured;
  std::ranges::transform(variants(p.dtype), measured.begin(), [](const Variant& v) {
    return Measured<Variant>{&v, v.unit, v.invariant};
  });
  return choose(p, measured, current_device().multiprocessors, speed_of(kCosts));
}

std::string supports(const LinearProblem& p) {
  if (p.order != WeightOrder::fragments16) return text("it takes weights in order fragments16, not ", name_of(p.order));
  if (!lowbit::is_e2m1(p.format)) {
    return text("it takes nvfp4, mxfp4 and e2m1_row, not ", lowbit::name_of(p.format));
  }
  if (std::string reason = refuse_other_than_hopper(); !reason.empty()) return reason;
  return linear::refuse(p);
}

bool normed(const LinearProblem& p) { return p.norm.kind != Norm::none; }
std::int64_t pitch_of(const LinearProblem& p) { return (p.K + 7) / 8 * 8; }
// Rows after the norm.
std::size_t x_bytes(const LinearProblem& p) {
  return normed(p) ? linear::aligned(static_cast<std::size_t>(p.M * pitch_of(p)) * size_of(p.dtype)) : 0;
}

double estimate(const LinearProblem& p, int /*workers*/) {
  if (p.empty()) return 0.0;
  return choice(p).seconds + linear::activation_seconds(p) + (normed(p) ? linear::rows_seconds(p) : 0.0);
}

std::size_t workspace(const LinearProblem& p, int /*workers*/) {
  return p.empty() ? 0 : x_bytes(p) + linear::workspace_of(choice(p).plan);
}

std::string describe(const LinearProblem& p, int /*workers*/) {
  if (p.empty()) return "nothing to launch";
  const Choice<Variant> chosen = choice(p);
  return words_of(chosen.variant->tile, chosen.plan) + (normed(p) ? ", after a pass for the norm" : "");
}

void launch(const LinearProblem& p, const Runtime& runtime) {
  constexpr std::int64_t kPanel = 64;  // columns of x in a row of the swizzle
  if (p.empty()) return;
  const Choice<Variant> chosen = choice(p);
  const Variant& v = *chosen.variant;
  const auto stream = static_cast<cudaStream_t>(runtime.stream);
  auto* const memory = static_cast<std::byte*>(runtime.workspace.data);
  if (normed(p)) run_rows_pass(linear::rows_pass(p, pitch_of(p), memory, nullptr), stream);
  const std::byte* const x = normed(p) ? memory : p.x.data;
  const std::int64_t stride = p.M > 1 && !normed(p) ? *linear::row_stride(p.x) : pitch_of(p);
  sm90::linear::Params<lowbit::FragmentBlock> params{};
  params.x_by_panel = p.K % kPanel != 0;
  params.x_rows = sm90::linear::box_rows(v.tile.tokens, p.M);
  params.x = make_tensor_map(x, p.dtype,
                             params.x_by_panel ? TensorMapShape<4>{.extent = {p.K, p.M, 1, 1},
                                                                   .stride = {stride, p.M * stride, p.M * stride},
                                                                   .box = {kPanel, params.x_rows, 1, 1}}
                                               : TensorMapShape<4>{.extent = {kPanel, p.M, p.K / kPanel, 1},
                                                                   .stride = {stride, kPanel, p.M * stride},
                                                                   .box = {kPanel, params.x_rows, v.x_panels, 1}});
  params.weights = reinterpret_cast<const lowbit::FragmentBlock*>(p.fragments().data + p.fragments().layout.blocks);
  params.out = linear::output_of(p);
  params.schedule = schedule_of(p, chosen.plan, memory + x_bytes(p));
  v.launch(params, chosen.plan.grid, stream);
}

}  // namespace

std::span<const Variant> sm90::linear_w4a16::variants(DType type) {
  return variants_of<Instance, kTypes, kVariants>(type);
}

const LinearKernel kSm90LinearW4A16 = {.name = "sm90_w4a16",
                                       .method = "linear",
                                       .device = Device::cuda,
                                       .automatic = true,
                                       .supports = supports,
                                       .estimate = estimate,
                                       .workspace = workspace,
                                       .launch = launch,
                                       .describe = describe,
                                       .extras = kNormInFront,
                                       .costs = kCosts};

}  // namespace heddle::cuda
