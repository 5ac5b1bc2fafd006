// The candidate "sm90_w4a8": what it takes, which tile, and the launches.
#include <algorithm>
#include <array>
#include <type_traits>

#include "core/check.h"
#include "cuda/any/linear/host.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"
#include "cuda/common/tensor_map.h"
#include "cuda/kernels.h"
#include "cuda/sm90/linear_w4a8/variants.h"

namespace heddle::cuda {
namespace {

using namespace linear;
using namespace sm90::linear_w4a8;

constexpr CostLine<LinearProblem> kCosts[] = {
    {"sm90_w4a8", {5.8e-6, 1087e12, 0}, {"nvfp4", WeightOrder::fragments8, DType::bf16, 4096, 8192, 8192}},
    {"sm90_w4a8 few rows", {5.8e-6, 0, 2.35e12}, {"nvfp4", WeightOrder::fragments8, DType::bf16, 16, 28672, 8192}},
};

template <class Block>
Choice<sm90::linear::Variant<Block>> choice(const LinearProblem& p) {
  using Kernel = sm90::linear::Variant<Block>;
  std::array<Measured<Kernel>, std::size(kVariants)> measured;
  std::ranges::transform(variants(p.dtype), measured.begin(), [](const Variant& v) {
    return Measured<Kernel>{&v.of<Block>(), v.unit, v.invariant};
  });
  return choose(p, measured, current_device().multiprocessors, speed_of(kCosts));
}
// Calls visit(choice) with the variant for the weights' blocks.
template <class Visit>
auto with_choice(const LinearProblem& p, Visit visit) {
  return lowbit::has_scaled_blocks(p.format) ? visit(choice<ScaledBlock8>(p)) : visit(choice<FragmentBlock8>(p));
}

std::int64_t pitch_of(const LinearProblem& p) { return p.fragments().layout.column_blocks * lowbit::kBlockColumns; }
std::size_t x_bytes(const LinearProblem& p) { return aligned(static_cast<std::size_t>(p.M * pitch_of(p))); }

std::string supports(const LinearProblem& p) {
  if (p.order != WeightOrder::fragments8) return text("it takes weights in order fragments8, not ", name_of(p.order));
  if (std::string reason = refuse_other_than_hopper(); !reason.empty()) return reason;
  return linear::refuse(p);
}

double estimate(const LinearProblem& p, int /*workers*/) {
  if (p.empty()) return 0.0;
  return linear::rows_traffic_seconds(p) + linear::activation_seconds(p) +
         with_choice(p, [](const auto& chosen) { return chosen.seconds; });
}

// x in e4m3, its scales, partial sums.
std::size_t workspace(const LinearProblem& p, int /*workers*/) {
  if (p.empty()) return 0;
  return x_bytes(p) + aligned(static_cast<std::size_t>(p.M) * sizeof(float)) +
         with_choice(p, [](const auto& chosen) { return workspace_of(chosen.plan); });
}

std::string describe(const LinearProblem& p, int /*workers*/) {
  if (p.empty()) return "nothing to launch";
  return with_choice(p, [](const auto& chosen) { return words_of(chosen.variant->tile, chosen.plan); }) +
         ", after a pass that rounds x to e4m3";
}

template <class Block>
void launch_chosen(const LinearProblem& p, const Choice<sm90::linear::Variant<Block>>& chosen, const Runtime& runtime) {
  constexpr std::int64_t kPanel = lowbit::kBlockColumns;  // columns of x in a row of the swizzle
  const sm90::linear::Variant<Block>& v = *chosen.variant;
  const auto stream = static_cast<cudaStream_t>(runtime.stream);
  const std::int64_t pitch = pitch_of(p);
  auto* const x = static_cast<std::byte*>(runtime.workspace.data);
  auto* const scales = reinterpret_cast<float*>(x + x_bytes(p));
  std::byte* const rest = x + x_bytes(p) + aligned(static_cast<std::size_t>(p.M) * sizeof(float));
  linear::RowsPass pass = linear::rows_pass(p, pitch, x, scales);
  pass.interleaved = std::is_same_v<Block, ScaledBlock8>;
  run_rows_pass_to_e4m3(pass, stream);
  sm90::linear::Params<Block> params{};
  params.x_rows = sm90::linear::box_rows(v.tile.tokens, p.M);
  params.x = make_tensor_map(x, DType::f8e4m3,
                             TensorMapShape<4>{.extent = {kPanel, p.M, pitch / kPanel, 1},
                                               .stride = {pitch, kPanel, p.M * pitch},
                                               .box = {kPanel, params.x_rows, v.x_panels, 1}});
  params.weights = reinterpret_cast<const Block*>(p.fragments().data + p.fragments().layout.blocks);
  params.out = linear::output_of(p);
  params.out.token_scales = scales;
  params.schedule = schedule_of(p, chosen.plan, rest);
  v.launch(params, chosen.plan.grid, stream);
}

void launch(const LinearProblem& p, const Runtime& runtime) {
  if (p.empty()) return;
  with_choice(p, [&](const auto& chosen) { launch_chosen(p, chosen, runtime); });
}

}  // namespace

std::span<const Variant> sm90::linear_w4a8::variants(DType type) {
  return variants_of<Instance, kTypes, kVariants>(type);
}

const LinearKernel kSm90LinearW4A8 = {.name = "sm90_w4a8",
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
