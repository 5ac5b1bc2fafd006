// The candidate "sm90": what it takes, which instantiation, and the launch.
#include <algorithm>
#include <bit>
#include <cmath>

#include "core/check.h"
#include "cuda/attention.h"
#include "cuda/common/device.h"
#include "cuda/common/pairs.h"
#include "cuda/common/tensor_map.h"
#include "cuda/sm90/attention_fwd/launch.h"

namespace heddle::cuda {
namespace {

using namespace sm90::attention_fwd;

constexpr int kRows = 64;  // of a warpgroup
constexpr std::int64_t kMaxLength = kOpen / 2;

bool aligned(const Operand& x) {
  const auto fits = [](std::int64_t stride) { return stride >= 0 && stride % 8 == 0; };
  return reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 && x.stride_d == 1 && fits(x.stride_b) &&
         fits(x.stride_s) && fits(x.stride_h);
}

Refusal supports(const AttentionProblem& p) {
  const DeviceProperties& device = current_device();
  if (device.major == 0) return "there is no usable NVIDIA GPU or driver";
  if (device.major != 9) {
    return text("it needs a Hopper GPU (compute capability 9.0); this one has ", device.major, ".", device.minor);
  }
  if (p.dtype == DType::f32) return "it takes float16 and bfloat16, not float32";
  if (p.D % 8 != 0 || p.Dv % 8 != 0) return text("head sizes must be multiples of 8; found ", p.D, " and ", p.Dv);
  const auto refusal = [](const char* name) {
    return text(name, "'s rows must be contiguous, with address and strides in multiples of 16 bytes");
  };
  if (p.B > 0 && p.q_rows > 0) {
    if (!aligned(p.q)) return refusal("q");
    if (p.o && !aligned(p.o)) return refusal("o");
    if (p.k_rows > 0 && !aligned(p.k)) return refusal("k");
    if (p.k_rows > 0 && !aligned(p.v)) return refusal("v");
  }
  if (p.q_rows > kMaxLength || p.k_rows > kMaxLength) return text("q and k must have fewer than ", kMaxLength, " rows");
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

struct Plan {
  int pack, positions, units, q_tiles, section;
  bool dynamic;  // tiles are dealt out while the kernel runs
};

Plan plan(const AttentionProblem& p, const Variant& v) {
  Plan plan{};
  const auto tiles = [&](int pack) {
    const std::int64_t positions = std::int64_t{v.consumers} * (kRows / pack);
    return (p.Sq + positions - 1) / positions * (p.H / pack);
  };
  // The heads of a group share tiles where that takes fewer of them: short q, mostly.
  const int group = static_cast<int>(std::min<std::int64_t>(p.G, kRows));
  plan.pack = p.G == group && tiles(group) < tiles(1) ? group : 1;
  plan.positions = kRows / plan.pack;
  plan.units = static_cast<int>(p.H / plan.pack);
  const int rows = v.consumers * plan.positions;
  plan.q_tiles = static_cast<int>((p.Sq + rows - 1) / rows);
  const bool band = p.causal != Causal::none || p.window_left >= 0 || p.window_right >= 0;
  const bool packed = p.cu_seqlens_q != nullptr, uneven = packed || p.cu_seqlens_k || p.seqused_k || p.seqused_q;
  // Below, dealing tiles out in turn balances well enough, and costs no counter.
  plan.dynamic = uneven || (band && p.Sk > 1024);
  // Half of the L2 cache for keys and values; a power of two, so that the last section is not a small one.
  const std::int64_t bytes = p.Sk * (p.D + p.Dv) * 2;
  const auto heads = static_cast<std::uint64_t>(
      std::max<std::int64_t>(current_device().l2_bytes * 9 / 16 / std::max<std::int64_t>(bytes, 1), 1));
  // Heads that share a bias or mask read it together, too.
  const auto shared = [](const Plane& x) { return x && x.stride_i != 0 && x.stride_h == 0; };
  const std::int64_t section = plan.dynamic || shared(p.bias) || shared(p.mask)
                                   ? static_cast<std::int64_t>(std::bit_floor(heads)) * (p.G / plan.pack)
                               : band ? 4
                                      : 1;
  plan.section = static_cast<int>(std::min<std::int64_t>(section, plan.units * p.B));
  return plan;
}

double estimate(const AttentionProblem& p, int /*workers*/) {
  // Measured on an H200: 600 TFLOP/s at D 128, and what a launch takes.
  const double flops = 2.0 * static_cast<double>(p.D + p.Dv) * attended_pairs(p) * static_cast<double>(p.B * p.H);
  return 4e-6 + flops / 600e12;
}

std::size_t workspace(const AttentionProblem& p, int /*workers*/) {
  return plan(p, variant_for(p)).dynamic ? sizeof(int) : 0;
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
  const Plan plan = cuda::plan(p, general);
  const ScorePlane bias = score_plane(p.bias, plan.pack, general.planes > 0),
                   mask = score_plane(p.mask, plan.pack, general.planes > (bias.access == PlaneAccess::copies ? 1 : 0));
  const Variant& v = specialised(p, general, bias, mask);
  const auto stream = static_cast<cudaStream_t>(runtime.stream);
  const bool packed_q = p.cu_seqlens_q != nullptr, packed_k = p.cu_seqlens_k != nullptr;
  const std::int64_t q_rows = p.q_rows, k_rows = p.k_rows, q_batch = packed_q ? 1 : p.B, k_batch = packed_k ? 1 : p.B;
  Params params{};
  params.q =
      make_tensor_map(p.q.data, p.dtype,
                      TensorMapShape<5>{.extent = {p.D, plan.pack, q_rows, plan.units, q_batch},
                                        .stride = {p.q.stride_h, p.q.stride_s, p.q.stride_h * plan.pack, p.q.stride_b},
                                        .box = {64, plan.pack, plan.positions, 1, 1}});
  const auto key_map = [&](const Operand& x, std::int64_t size) {
    return make_tensor_map(k_rows > 0 ? x.data : p.q.data, p.dtype,  // without keys, nothing is read
                           TensorMapShape<4>{.extent = {size, k_rows, p.Hkv, k_batch},
                                             .stride = {x.stride_s, x.stride_h, x.stride_b},
                                             .box = {64, v.tile_k, 1, 1}});
  };
  params.k = key_map(p.k, p.D);
  params.v = key_map(p.v, p.Dv);
  params.o = p.o.data;
  params.o_stride_b = p.o.stride_b;
  params.o_stride_s = p.o.stride_s;
  params.o_stride_h = p.o.stride_h;
  params.lse = p.lse.as<float>();
  params.lse_stride_b = p.lse.stride_b;
  params.lse_stride_h = p.lse.stride_h;
  params.lse_stride_s = p.lse.stride_i;
  params.sink = p.sink.as<float>();
  params.sink_stride = p.sink.stride_h;
  params.Sq = static_cast<int>(p.Sq);
  params.Sk = static_cast<int>(p.Sk);
  params.Dv = static_cast<int>(p.Dv);
  params.B = static_cast<int>(p.B);
  params.q_rows = static_cast<int>(q_rows);
  params.k_rows = static_cast<int>(std::max<std::int64_t>(k_rows, 1));
  params.cu_seqlens_q = p.cu_seqlens_q;
  params.cu_seqlens_k = p.cu_seqlens_k;
  params.seqused_q = p.seqused_q;
  params.seqused_k = p.seqused_k;
  params.k_appended = static_cast<int>(p.k_appended);
  params.heads = plan.units;
  params.pack = plan.pack;
  params.pack_inverse = (65536 + plan.pack - 1) / plan.pack;
  params.kv_divisor = static_cast<int>(p.G / plan.pack);
  params.positions = plan.positions;
  params.q_tiles = plan.q_tiles;
  const std::int64_t tiles = std::int64_t{plan.q_tiles} * plan.units * p.B;
  if (tiles > (1 << 30)) throw RuntimeError(text("[attention_forward] ", tiles, " tiles are more than 2^30"));
  // How many tiles packed sequences have, only the kernel knows; this bounds them, and the CTAs worth starting.
  params.tiles = static_cast<int>(tiles);
  params.section = plan.section;
  params.top_left = p.causal == Causal::top_left;
  params.left = static_cast<int>(p.window_left < 0 ? kOpen : std::min<std::int64_t>(p.window_left, kOpen));
  params.right = static_cast<int>(p.window_right < 0 ? kOpen : std::min<std::int64_t>(p.window_right, kOpen));
  if (p.causal != Causal::none) params.right = std::min(params.right, 0);
  params.scale_log2 = p.scale * 1.44269504088896341f;
  params.scale = p.scale;
  params.softcap = softcap(p);
  params.alibi = p.alibi.as<float>();
  params.alibi_stride_b = p.alibi.stride_b;
  params.alibi_stride_h = p.alibi.stride_h;
  params.bias = bias;
  params.mask = mask;
  params.bias_is_float = p.bias.dtype == DType::f32;
  if (plan.dynamic) {
    params.next_tile = static_cast<int*>(runtime.workspace.data);
    check(cudaMemsetAsync(params.next_tile, 0, sizeof(int), stream), "attention_forward");
  }
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
