// The candidate "sm80_linear": what it takes, which tile, and the launch.
#include <array>

#include "core/check.h"
#include "cuda/any/linear/host.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"
#include "cuda/kernels.h"
#include "cuda/sm80/linear/variants.h"

namespace heddle::cuda {
namespace {

using namespace linear;
using namespace sm80::linear;

// Two of each decoder, in the order of Decoder: for many rows and for few.
constexpr CostLine<LinearProblem> kCosts[] = {
    {"sm80_linear e2m1", {3.3e-6, 311.7e12, 0}, {"nvfp4", WeightOrder::fragments16, DType::bf16, 4096, 8192, 8192}},
    {"sm80_linear e2m1 few rows",
     {3.3e-6, 0, 2.53e12},
     {"nvfp4", WeightOrder::fragments16, DType::bf16, 16, 28672, 8192}},
    {"sm80_linear int4", {3.3e-6, 281.6e12, 0}, {"int4_g128", WeightOrder::fragments16, DType::bf16, 4096, 8192, 8192}},
    {"sm80_linear int4 few rows",
     {3.3e-6, 0, 2.21e12},
     {"int4_g128", WeightOrder::fragments16, DType::bf16, 16, 28672, 8192}},
    {"sm80_linear int8", {3.3e-6, 262.9e12, 0}, {"int8_row", WeightOrder::fragments16, DType::bf16, 4096, 8192, 8192}},
    {"sm80_linear int8 few rows",
     {3.3e-6, 0, 3.43e12},
     {"int8_row", WeightOrder::fragments16, DType::bf16, 16, 28672, 8192}},
    {"sm80_linear e4m3", {3.3e-6, 258.0e12, 0}, {"fp8_row", WeightOrder::fragments16, DType::bf16, 4096, 8192, 8192}},
    {"sm80_linear e4m3 few rows",
     {3.3e-6, 0, 3.38e12},
     {"fp8_row", WeightOrder::fragments16, DType::bf16, 16, 28672, 8192}},
    {"sm80_linear lookup", {3.3e-6, 260.4e12, 0}, {"nf4", WeightOrder::fragments16, DType::bf16, 4096, 8192, 8192}},
    {"sm80_linear lookup few rows",
     {3.3e-6, 0, 2.14e12},
     {"nf4", WeightOrder::fragments16, DType::bf16, 16, 28672, 8192}},
};

Decoder decoder_of(const lowbit::Format& format) {
  switch (format.element) {
    case lowbit::Element::e2m1:
    case lowbit::Element::e2m1_row:
      return Decoder::kE2M1;
    case lowbit::Element::int4:
      return Decoder::kInt4;
    case lowbit::Element::int8:
      return Decoder::kInt8;
    case lowbit::Element::e4m3:
      return Decoder::kE4M3;
    default:
      return Decoder::kLookup;
  }
}

Choice<Variant> choice(const LinearProblem& p) {
  constexpr double kGroups = 1.4;      // times as long with several groups of int4 in a block, or zero points
  constexpr double kHalfEmpty = 0.76;  // of a unit's time, where the tile's second half has no tokens
  const Decoder decoder = decoder_of(p.format);
  const Variants& v = first_that(variants(p.dtype), [&](const Variants& x) { return x.decoder == decoder; });
  const bool plain = p.format.group >= lowbit::kBlockColumns && !p.format.zero_points;
  const double factor = decoder == Decoder::kInt4 && !plain ? kGroups : 1.0;
  const bool half_empty = p.M <= v.many.tile.tokens / 2;
  const Speed speed = speed_of(std::span(kCosts).subspan(2 * static_cast<std::size_t>(decoder)));
  const std::array<Measured<Variant>, 2> measured = {
      {{.variant = &v.few, .unit = factor * v.few_unit * speed.few},
       {.variant = &v.many,
        .unit = (half_empty ? kHalfEmpty : 1.0) * (factor * v.many_unit * speed.many),
        .invariant = true}}};
  return choose(p, measured, current_device().multiprocessors, {.fixed = speed.fixed});
}

// As many stages as there is room for, beside a table without conflicts if that leaves three.
void set_stages(const Variant& v, Params& params) {
  const int room = current_device().shared_memory;
  for (const int copies : {32, 8}) {
    params.lookup_copies = copies;
    for (const int stages : {6, 4, 3, 2}) {
      params.stages = stages;
      if (shared_bytes(v, stages, copies) <= room) break;
    }
    if (!v.table || (params.stages > 2 && shared_bytes(v, params.stages, copies) <= room)) return;
  }
}

std::string supports(const LinearProblem& p) {
  if (p.order != WeightOrder::fragments16) return text("it takes weights in order fragments16, not ", name_of(p.order));
  if (std::string reason = refuse_before_ampere(); !reason.empty()) return reason;
  return refuse(p);
}

bool normed(const LinearProblem& p) { return p.norm.kind != Norm::none; }
// Rows after the norm.
std::size_t x_bytes(const LinearProblem& p) {
  return normed(p) ? aligned(static_cast<std::size_t>(p.M * p.K) * size_of(p.dtype)) : 0;
}

double estimate(const LinearProblem& p, int /*workers*/) {
  if (p.empty()) return 0.0;
  return choice(p).seconds + activation_seconds(p) + (normed(p) ? rows_seconds(p) : 0.0);
}

std::size_t workspace(const LinearProblem& p, int /*workers*/) {
  return p.empty() ? 0 : x_bytes(p) + workspace_of(choice(p).plan);
}

std::string describe(const LinearProblem& p, int /*workers*/) {
  if (p.empty()) return "nothing to launch";
  const Choice<Variant> chosen = choice(p);
  return words_of(chosen.variant->tile, chosen.plan) + (normed(p) ? ", after a pass for the norm" : "");
}

void launch(const LinearProblem& p, const Runtime& runtime) {
  if (p.empty()) return;
  const Choice<Variant> chosen = choice(p);
  const auto stream = static_cast<cudaStream_t>(runtime.stream);
  auto* const memory = static_cast<std::byte*>(runtime.workspace.data);
  if (normed(p)) run_rows_pass(rows_pass(p, p.K, memory, nullptr), stream);
  const lowbit::BlockLayout block = lowbit::block_layout(p.format);
  Params params{};
  params.x = normed(p) ? memory : p.x.data;
  params.x_stride = normed(p) ? p.K : row_stride(p.x).value_or(0);
  params.k = static_cast<int>(p.K);
  params.weights = p.fragments().data + p.fragments().layout.blocks;
  params.block_bytes = block.bytes;
  params.group_shift = block.groups == 4 ? 0 : block.groups == 2 ? 1 : 2;
  params.zeros = block.zeros;
  if (chosen.variant->table) {
    const auto values = lowbit::lookup_values(p.format.element);
    std::copy(values.begin(), values.end(), params.lookup);
  }
  set_stages(*chosen.variant, params);
  params.out = output_of(p);
  params.schedule = schedule_of(p, chosen.plan, memory + x_bytes(p));
  chosen.variant->launch(params, chosen.plan.grid, stream);
}

}  // namespace

std::span<const Variants> sm80::linear::variants(DType type) { return variants_of<Instance, kTypes, kVariants>(type); }

const LinearKernel kSm80Linear = {.name = "sm80_linear",
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
