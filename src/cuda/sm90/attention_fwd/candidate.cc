// The candidate "sm90": what it takes, which instantiation, and the launch.
#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "cuda/attention.h"
#include "cuda/common/cost.h"
#include "cuda/common/device.h"
#include "cuda/common/pairs.h"
#include "cuda/common/requirements.h"
#include "cuda/sm90/attention_fwd/launch.h"
#include "cuda/sm90/attention_fwd/plan.h"

namespace heddle::cuda {
namespace {

using namespace sm90::attention_fwd;

Refusal supports(const AttentionProblem& p) {
  if (Refusal reason = refuse_other_than_hopper(); !reason.empty()) return reason;
  if (p.dtype == DType::f32) return "it takes float16 and bfloat16, not float32";
  if (p.D % 8 != 0 || p.Dv % 8 != 0) return text("head sizes must be multiples of 8; found ", p.D, " and ", p.Dv);
  if (Refusal reason = refuse_layout(p); !reason.empty()) return reason;
  if (p.dropout.p != 0) return "it has no dropout";
  if (p.page_table || p.cache_batch_idx || p.cache_leftpad) return "it has no cached keys";
  return "";
}

// Of one range of head sizes; the same tiles.
struct OptionVariants {
  const Variant &softcap, &alibi, &planes, &all;
};
struct Variants {
  const Variant &d64, &d64_wide, &d96, &d128, &d192, &d256;
  OptionVariants d64_options, d128_options, d256_options;
};
constexpr Variants kBf16 = {kBf16D64,
                            kBf16D64Wide,
                            kBf16D96,
                            kBf16D128,
                            kBf16D192,
                            kBf16D256,
                            {kBf16D64Softcap, kBf16D64Alibi, kBf16D64Planes, kBf16D64Options},
                            {kBf16D128Softcap, kBf16D128Alibi, kBf16D128Planes, kBf16D128Options},
                            {kBf16D256Softcap, kBf16D256Alibi, kBf16D256Planes, kBf16D256Options}};
constexpr Variants kF16 = {kF16D64,
                           kF16D64Wide,
                           kF16D96,
                           kF16D128,
                           kF16D192,
                           kF16D256,
                           {kF16D64Softcap, kF16D64Alibi, kF16D64Planes, kF16D64Options},
                           {kF16D128Softcap, kF16D128Alibi, kF16D128Planes, kF16D128Options},
                           {kF16D256Softcap, kF16D256Alibi, kF16D256Planes, kF16D256Options}};

bool has_score_options(const AttentionProblem& p) {
  return p.softcap != 0 || p.alibi || p.bias || p.mask || !(p.scale > 0);
}

// The one for all score options, if there are any.
const Variant& variant_for(const AttentionProblem& p) {
  const Variants& all = p.dtype == DType::bf16 ? kBf16 : kF16;
  const std::int64_t size = std::max(p.D, p.Dv);
  if (has_score_options(p)) {
    return (size <= 64 ? all.d64_options : size <= 128 ? all.d128_options : all.d256_options).all;
  }
  // D 64 has two: two warpgroups with q in registers start sooner, three need less of the L2 cache.
  if (size <= 64) return p.Sk > (p.causal == Causal::none ? 1024 : 2048) ? all.d64_wide : all.d64;
  return size <= 96 ? all.d96 : size <= 128 ? all.d128 : size <= 192 ? all.d192 : all.d256;
}

// A faster one, if it does.
const Variant& specialised(const AttentionProblem& p, const Variant& general, const ScorePlane& bias,
                           const ScorePlane& mask) {
  if (!has_score_options(p) || !(p.scale > 0)) return general;
  const Variants& all = p.dtype == DType::bf16 ? kBf16 : kF16;
  const OptionVariants& options = general.head_size <= 64    ? all.d64_options
                                  : general.head_size <= 128 ? all.d128_options
                                                             : all.d256_options;
  const bool planes = p.bias || p.mask;
  const int kinds = (p.softcap != 0) + static_cast<bool>(p.alibi) + planes;
  if (kinds != 1 || bias.access == PlaneAccess::direct || mask.access == PlaneAccess::direct) return general;
  return planes ? options.planes : p.alibi ? options.alibi : options.softcap;
}

double estimate(const AttentionProblem& p, int /*workers*/) {
  const std::int64_t size = std::max(p.D, p.Dv);
  const Cost& cost = cost_of(size <= 64 ? "sm90 d64" : size <= 128 ? "sm90 d128" : "sm90 d256");
  const double pairs = attended_pairs(p), width = 2.0 * static_cast<double>(p.D + p.Dv);
  const Variant& v = variant_for(p);
  const Plan plan = make_plan(p, v.consumers);
  if (plan.q_tiles != 1 || p.Sq == 0) return cost.fixed + width * pairs * static_cast<double>(p.B * p.H) / cost.flops;
  // Few rows: a tile takes as long as a full one, and one multiprocessor reads all its keys.
  const auto tiles = static_cast<double>(p.B * plan.units);
  const double tile = width * pairs / static_cast<double>(p.Sq) * v.consumers * 64;
  return tiled_seconds(cost, tiles, tile);
}

std::size_t workspace(const AttentionProblem& p, int /*workers*/) {
  return make_plan(p, variant_for(p).consumers).dynamic ? sizeof(int) : 0;
}

Softcap softcap(const AttentionProblem& p) {
  Softcap cap{};
  if (!(p.softcap > 0)) return cap;
  // tanh(y) / y in y^2, for |y| <= 0.75, right to 6e-7.
  constexpr double kSeries[] = {0.9999994349, -0.3332825153, 0.1325898322, -0.05005630265, 0.01292963238};
  const double inside = static_cast<double>(p.scale) / p.softcap;
  cap.inside = static_cast<float>(inside);
  cap.outside = static_cast<float>(1 / inside);
  cap.limit = static_cast<float>(0.75 / std::abs(inside));
  for (int k = 0; k < 5; ++k) cap.series[k] = static_cast<float>(kSeries[k] * std::pow(inside, 2 * k));
  return cap;
}

// in_memory: whether shared memory has a place for it.
ScorePlane score_plane(const Plane& plane, int pack, bool in_memory) {
  if (!plane) return {};
  const auto multiple_of = [&](std::int64_t bytes) {
    const auto size = static_cast<std::int64_t>(size_of(plane.dtype));
    return reinterpret_cast<std::uintptr_t>(plane.data) % bytes == 0 && plane.stride_b * size % bytes == 0 &&
           plane.stride_h * size % bytes == 0 && plane.stride_i * size % bytes == 0;
  };
  const int copy_bytes = multiple_of(16) ? 16 : multiple_of(4) ? 4 : 0;
  const bool copies = in_memory && pack == 1 && plane.stride_j == 1 && size_of(plane.dtype) <= 2 && copy_bytes > 0;
  const PlaneAccess access = plane.stride_i == 0 && (pack == 1 || plane.stride_h == 0) ? PlaneAccess::keys
                             : copies                                                  ? PlaneAccess::copies
                                                                                       : PlaneAccess::direct;
  return {plane.data, access, copy_bytes, plane.stride_b, plane.stride_h, plane.stride_i, plane.stride_j};
}

void launch(const AttentionProblem& p, const Runtime& runtime) {
  if (p.B == 0 || p.q_rows == 0) return;
  const Variant& general = variant_for(p);
  const Plan plan = make_plan(p, general.consumers);
  const ScorePlane bias = score_plane(p.bias, plan.pack, general.planes > 0),
                   mask = score_plane(p.mask, plan.pack, general.planes > (bias.access == PlaneAccess::copies ? 1 : 0));
  const Variant& v = specialised(p, general, bias, mask);
  const auto stream = static_cast<cudaStream_t>(runtime.stream);
  Params params{};
  fill(params, p, plan, v.tile_k);
  params.scale = p.scale;
  params.softcap = softcap(p);
  params.alibi = p.alibi.as<float>();
  params.alibi_stride_b = p.alibi.stride_b;
  params.alibi_stride_h = p.alibi.stride_h;
  params.bias = bias;
  params.mask = mask;
  params.bias_is_float = p.bias.dtype == DType::f32;
  if (plan.dynamic) params.next_tile = new_counter(runtime.workspace.data, stream);
  v.launch(params, std::min(params.tiles, current_device().multiprocessors), stream);
}

}  // namespace

const AttentionForwardKernel kSm90AttentionForward = {
    .name = "sm90",
    .method = "flash",
    .device = Device::cuda,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
};

}  // namespace heddle::cuda
