// The candidate "sm90": what it takes, which instantiation, and the launch.
#include <algorithm>
#include <cmath>
#include <utility>

#include "core/check.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"
#include "cuda/common/tensor_map.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "cuda/sm90/attention/plan.h"
#include "cuda/sm90/attention_fwd/variants.h"

namespace heddle::cuda {
namespace {

using namespace sm90::attention_fwd;
using sm90::attention::make_plan;
using sm90::attention::new_counter;
using sm90::attention::Plan;
using sm90::attention::refuse_layout;

Refusal supports(const AttentionProblem& p) {
  if (Refusal reason = refuse_other_than_hopper(); !reason.empty()) return reason;
  if (p.dtype == DType::f32) return "it takes float16 and bfloat16, not float32";
  if (p.D % 8 != 0 || p.Dv % 8 != 0) return text("head sizes must be multiples of 8; found ", p.D, " and ", p.Dv);
  if (Refusal reason = refuse_layout(p); !reason.empty()) return reason;
  if (p.dropout.p != 0) return "it has no dropout";
  if (p.page_table || p.cache_batch_idx || p.cache_leftpad) return "it has no cached keys";
  return "";
}

// Whether its rows are at multiples of so many bytes.
bool is_aligned(const Plane& x, std::int64_t bytes) {
  const auto multiple = [&](std::int64_t stride) {
    return stride >= 0 && stride * static_cast<std::int64_t>(size_of(x.dtype)) % bytes == 0;
  };
  return x.alignment >= bytes && multiple(x.stride_b) && multiple(x.stride_h) && multiple(x.stride_i);
}

// How a variant whose options these are reads a bias or mask; direct is for all that remains.
PlaneAccess access_to(const Plane& x, unsigned options, int pack) {
  if (!x) return PlaneAccess::none;
  if (x.stride_i == 0 && (pack == 1 || x.stride_h == 0)) return PlaneAccess::keys;
  const bool dense = pack == 1 && x.stride_j == 1 && size_of(x.dtype) <= 2;
  if ((options & kBulkPlane) != 0 && dense && is_aligned(x, 16)) return PlaneAccess::bulk;
  if ((options & kTilePlanes) != 0 && dense && is_aligned(x, 4)) return PlaneAccess::copies;
  return PlaneAccess::direct;
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

Softcap softcap(const AttentionProblem& p) {
  Softcap cap{};
  if (!(p.softcap > 0)) return cap;
  // tanh(y) / y in y^2, for |y| <= 0.5, right to 6e-7.
  constexpr double kSeries[] = {0.9999994558, -0.3332631795, 0.1319029664, -0.04440222626};
  const double inside = static_cast<double>(p.scale) / p.softcap;
  cap.inside = static_cast<float>(inside);
  cap.outside = static_cast<float>(1 / inside);
  cap.limit = static_cast<float>(0.5 / std::abs(inside));
  for (int k = 0; k < 4; ++k) {
    const double c = kSeries[k] * std::pow(inside, 2 * k);
    cap.series[k] = static_cast<float>(c);
    cap.log2_series[k] = static_cast<float>(c * static_cast<double>(p.scale) * 1.4426950408889634);
  }
  return cap;
}

ScorePlane score_plane(const Plane& x, PlaneAccess access) {
  if (!x) return {};
  return {x.data, access, is_aligned(x, 16) ? 16 : 4, x.stride_b, x.stride_h, x.stride_i, x.stride_j};
}

// rows: of a warpgroup.
CUtensorMap plane_map(const AttentionProblem& p, const Plane& x, int rows) {
  // Mask bytes are copied as they are.
  return make_tensor_map(x.data, x.dtype == DType::boolean ? DType::f8e4m3 : x.dtype,
                         TensorMapShape<4>{.extent = {p.Sk, p.Sq, x.stride_h == 0 ? 1 : p.H, x.stride_b == 0 ? 1 : p.B},
                                           .stride = {x.stride_i, x.stride_h, x.stride_b},
                                           .box = {128 / static_cast<int>(size_of(x.dtype)), rows, 1, 1}});
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
                                                           {kBulkPlane, "bias or mask in bulk"}};
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
  PlaneAccess bias = access_to(p.bias, v.options, plan.pack), mask = access_to(p.mask, v.options, plan.pack);
  // One that shared memory has no place for.
  if (bias == PlaneAccess::copies && mask == PlaneAccess::copies && v.tiles.planes() < 2) mask = PlaneAccess::direct;
  const auto stream = static_cast<cudaStream_t>(runtime.stream);
  Params params{};
  fill(params, p, plan, v.tiles.keys);
  params.scale = p.scale;
  params.scale_inverse = 1 / p.scale;
  params.softcap = softcap(p);
  params.alibi = p.alibi.as<float>();
  params.alibi_stride_b = p.alibi.stride_b;
  params.alibi_stride_h = p.alibi.stride_h;
  params.bias = score_plane(p.bias, bias);
  params.mask = score_plane(p.mask, mask);
  params.bias_is_float = p.bias.dtype == DType::f32;
  if (bias == PlaneAccess::bulk) params.plane = plane_map(p, p.bias, plan.positions);
  if (mask == PlaneAccess::bulk) params.plane = plane_map(p, p.mask, plan.positions);
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
    .costs = kCosts,
};

}  // namespace heddle::cuda
