// The candidate "sm90": what it takes, which instantiation, and the launch.
#include <algorithm>
#include <utility>

#include "core/check.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "cuda/sm90/attention_fwd/launch.h"

namespace heddle::cuda {
namespace {

using namespace sm90::attention_fwd;
using sm90::attention::make_plan;
using sm90::attention::new_counter;
using sm90::attention::Plan;
using sm90::attention::refuse_layout;
using sm90::attention::refuse_positions;

constexpr std::int64_t kLargestOfPieces = 128;  // of the head sizes

Refusal refuse_piece(const AttentionProblem& p) {
  if (std::max(p.D, p.Dv) > kLargestOfPieces) {
    return text("it has no head sizes above ", kLargestOfPieces, " beside q_offset and key_offset; found ", p.D,
                " and ", p.Dv);
  }
  if (p.softcap != 0 || p.alibi || p.bias || p.mask) {
    return "it has no softcap, ALiBi, bias and mask beside q_offset and key_offset";
  }
  if (!(p.scale > 0)) return text("scale must be positive beside q_offset and key_offset; found ", p.scale);
  return refuse_positions(p);
}

Refusal supports(const AttentionProblem& p) {
  if (Refusal reason = refuse_other_than_hopper(); !reason.empty()) return reason;
  if (p.dtype == DType::f32) return "it takes float16 and bfloat16, not float32";
  if (p.D % 8 != 0 || p.Dv % 8 != 0) return text("head sizes must be multiples of 8; found ", p.D, " and ", p.Dv);
  if (Refusal reason = refuse_layout(p); !reason.empty()) return reason;
  if (p.dropout.p != 0) return "it has no dropout";
  if (p.page_table || p.cache_batch_idx || p.cache_leftpad) return "it has no cached keys";
  if (p.float32_out && !p.piece()) return "it has no o in float32 without q_offset or key_offset";
  return p.piece() ? refuse_piece(p) : "";
}

// Two warpgroups with q in registers start sooner, and compute less of few rows and beside a window; three need less of
// the L2 cache. Bits are the same.
bool is_short(const AttentionProblem& p) {
  const std::int64_t right = p.causal != Causal::none ? 0 : p.window_right;
  const bool narrow = p.window_left >= 0 && right >= 0 && p.window_left + right <= 2048;
  const bool few = p.G * p.Sq <= 128;
  return narrow || few || p.Sk <= (p.causal == Causal::none ? 1024 : 2048);
}

// Whether a variant does all that p asks for.
bool takes(const Variant& v, const AttentionProblem& p) {
  const unsigned o = v.options;
  if (std::max(p.D, p.Dv) > v.tiles.head || (v.short_calls && !is_short(p))) return false;
  if (((o & kPieces) != 0) != p.piece()) return false;
  if (o == kAllOptions) return true;
  if (!(p.scale > 0)) return false;
  const int pack = p.bias || p.mask ? make_plan(p, v.tiles.consumers).pack : 1;
  const PlaneAccess bias = access_to(p.bias, o, pack), mask = access_to(p.mask, o, pack);
  const auto reads = [&](PlaneAccess access, unsigned by_keys) {
    return access == PlaneAccess::none || (access == PlaneAccess::keys && (o & by_keys) != 0) ||
           (access == PlaneAccess::bulk && (o & kBulkPlane) != 0) ||
           (access == PlaneAccess::copies && (o & kTilePlanes) != 0);
  };
  if (!reads(bias, kKeyTerms | kKeyPlanes) || !reads(mask, kKeyTerms | kKeyPlanes | kBulkPlane)) return false;
  if (bias == PlaneAccess::bulk && mask == PlaneAccess::bulk) return false;
  if (bias == PlaneAccess::copies && mask == PlaneAccess::copies && v.tiles.planes() < 2) return false;
  return (p.softcap == 0 || (o & kSoftcap) != 0) && (!p.alibi || (o & (kAlibi | kAlibiTerms)) != 0);
}

const Variant& variant_for(const AttentionProblem& p) {
  return first_that(variants(p.dtype), [&](const Variant& v) { return takes(v, p); });
}

constexpr CostLine<AttentionProblem> kCosts[] = {
    {"sm90 d64", {4.9e-6, 552e12, 0}, {DType::bf16, DType::bf16, Precision::f32, 4, 32, 32, 4096, 4096, 64}},
    {"sm90 d128", {5.8e-6, 728e12, 0}, {DType::bf16, DType::bf16, Precision::f32, 4, 16, 16, 4096, 4096, 128}},
    {"sm90 d256", {5.6e-6, 807e12, 0}, {DType::bf16, DType::bf16, Precision::f32, 4, 8, 8, 4096, 4096, 256}},
};

double estimate(const AttentionProblem& p, int /*workers*/) {
  const std::int64_t size = std::max(p.D, p.Dv);
  const Cost& cost = cost_of(kCosts[size <= 64 ? 0 : size <= 128 ? 1 : 2]);
  const Variant& v = variant_for(p);
  const Plan plan = make_plan(p, v.tiles.consumers);
  const auto tiles = static_cast<double>(p.B * plan.units * plan.q_tiles);
  return tiles_seconds(p, cost, cost_of(kSm90AttentionDecode.costs.front()), tiles, v.tiles.consumers * kRows);
}

std::size_t workspace(const AttentionProblem& p, int /*workers*/) {
  return make_plan(p, variant_for(p).tiles.consumers).dynamic ? sizeof(int) : 0;
}

std::string describe(const AttentionProblem& p, int /*workers*/) {
  const Variant& v = variant_for(p);
  const Plan plan = make_plan(p, v.tiles.consumers);
  std::string words = text(v.name, ": tiles of ", kRows * v.tiles.consumers, " rows x ", v.tiles.keys, " keys");
  if (v.options == kAllOptions) {
    words += ", with all score options";
  } else {
    constexpr std::pair<unsigned, const char*> kNames[] = {{kSoftcap, "a softcap"},
                                                           {kAlibiTerms, "ALiBi in the product"},
                                                           {kKeyTerms, "bias or mask by keys in the product"},
                                                           {kTilePlanes, "bias or mask by copies"},
                                                           {kBulkPlane, "bias or mask in bulk"},
                                                           {kPieces, "offsets and steps"}};
    const char* before = ", with ";
    for (const auto& [option, name] : kNames) {
      if ((v.options & option) == 0) continue;
      words += text(before, name);
      before = " and ";
    }
  }
  if (plan.pack > 1) words += text(", ", plan.pack, " heads in a tile");
  return words + text(", ", p.B * plan.units * plan.q_tiles, " tiles on ", current_device().multiprocessors,
                      " multiprocessors", plan.dynamic ? ", dealt out as they run" : "");
}

void launch(const AttentionProblem& p, const Runtime& runtime) {
  if (p.B == 0 || p.q_rows == 0) return;
  const Variant& v = variant_for(p);
  const Plan plan = make_plan(p, v.tiles.consumers);
  const auto stream = static_cast<cudaStream_t>(runtime.stream);
  Params params = params_for(p, v, plan);
  if (plan.dynamic) params.next_tile = new_counter(runtime.workspace.data, stream);
  v.launch(params, std::min(params.tiles, current_device().multiprocessors), stream);
}

}  // namespace

std::span<const Variant> sm90::attention_fwd::variants(DType type) {
  return variants_of<Instance, kTypes, kVariants>(type);
}

const AttentionForwardKernel kSm90AttentionForward = {
    .name = "sm90",
    .method = "flash",
    .device = Device::cuda,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe,
    .extras = kPiece | kSteps | kFloat32Out,
    .costs = kCosts,
};

}  // namespace heddle::cuda
