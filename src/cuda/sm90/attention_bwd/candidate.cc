// The candidate "sm90" of the backward: what it takes, how a call is cut up, and the launches.
#include <algorithm>

#include "core/check.h"
#include "cuda/any/attention_bwd_rows/bias_gradient.h"
#include "cuda/any/attention_bwd_rows/launch.h"
#include "cuda/common/attention/log2.h"
#include "cuda/common/attention/window.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"
#include "cuda/common/tensor_map.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "cuda/sm90/attention/plan.h"
#include "cuda/sm90/attention_bwd/launch.h"
#include "cuda/sm90/attention_bwd/variants.h"
#include "problem/attended_pairs.h"

namespace heddle::cuda {
namespace {

using namespace sm90::attention_bwd;
using any::attention_bwd_rows::rounded_d_o;
using any::attention_bwd_rows::rounded_d_o_bytes;
using any::attention_bwd_rows::rounds_d_o;
using any::attention_bwd_rows::rows_per_head;
using any::attention_bwd_rows::statistics_bytes;

constexpr std::int64_t kMaxLength = kOpen / 4, kMaxSize = 256;

// What needs scores that are scaled before they are masked: what changes them pair by pair, softcap apart, and a scale
// that would not leave -inf alone.
bool has_planes(const AttentionProblem& p) { return p.alibi || p.bias || p.mask || (!(p.scale > 0) && p.softcap == 0); }

Refusal supports(const AttentionBackwardProblem& p) {
  if (Refusal reason = refuse_other_than_hopper(); !reason.empty()) return reason;
  if (p.dtype == DType::f32) return "it takes float16 and bfloat16, not float32";
  if (p.D % 8 != 0 || p.Dv % 8 != 0) return text("head sizes must be multiples of 8; found ", p.D, " and ", p.Dv);
  if (std::max(p.D, p.Dv) > kMaxSize) return text("it takes head sizes to ", kMaxSize, "; found ", p.D, " and ", p.Dv);
  if (Refusal reason = refuse_layout(p); !reason.empty()) return reason;
  if (Refusal reason = refuse_bias_gradient(p); !reason.empty()) return reason;
  if (p.softcap != 0 && has_planes(p)) return "it has no softcap beside alibi_slopes, a bias or a mask";
  if (p.dropout.p != 0) return "it has no dropout";
  if (!p.piece()) return "";
  if (p.alibi || p.bias || p.mask) return "it has no ALiBi, bias and mask beside q_offset and key_offset";
  return sm90::attention::refuse_positions(p);
}

const Variant& variant_for(const AttentionBackwardProblem& p) {
  const Option option = has_planes(p) ? Option::kPlanes : p.softcap != 0 ? Option::kSoftcap : Option::kNone;
  return first_that(variants(p.dtype),
                    [&](const Variant& v) { return v.option == option && std::max(p.D, p.Dv) <= v.tiles.head; });
}

constexpr CostLine<AttentionBackwardProblem> kCosts[] = {
    {"sm90_bwd d64", {10.7e-6, 481e12, 0}, {DType::bf16, DType::bf16, Precision::f32, 4, 32, 32, 4096, 4096, 64}},
    {"sm90_bwd d128", {12.1e-6, 559e12, 0}, {DType::bf16, DType::bf16, Precision::f32, 4, 16, 16, 4096, 4096, 128}},
    {"sm90_bwd d256", {14.3e-6, 467e12, 0}, {DType::bf16, DType::bf16, Precision::f32, 4, 8, 8, 4096, 4096, 256}},
};

double estimate(const AttentionBackwardProblem& p, int /*workers*/) {
  const int columns = variant_for(p).columns;
  const Cost& cost = cost_of(kCosts[columns <= 64 ? 0 : columns <= 128 ? 1 : 2]);
  const double flops = 5.0 * static_cast<double>(p.D + p.Dv) * attended_pairs(p) * static_cast<double>(p.B * p.H);
  return cost.fixed + flops / cost.flops;
}

// Where everything lies in the workspace, in bytes from its begin.
struct Layout {
  std::int64_t lse_log2 = 0, delta, largest, dq, dk, dv, d_o, turns, turns_bytes, bytes;

  Layout(const AttentionBackwardProblem& p, const Variant& v, std::int64_t parts) {
    const std::int64_t word = sizeof(float), row = v.columns * word;
    const std::int64_t key_sums = parts > 1 ? parts * p.Hkv * key_rows_per_head(p) * row : 0;
    delta = lse_log2 + statistics_bytes(p);
    largest = delta + statistics_bytes(p);
    dq = largest + (p.bias ? statistics_bytes(p) : 0);
    dk = dq + p.H * rows_per_head(p) * row;
    dv = dk + key_sums;
    d_o = dv + key_sums;
    turns = d_o + rounded_d_o_bytes(p);
    turns_bytes = p.deterministic ? (1 + p.H * rows_per_head(p) / v.tile_q) * word : 0;  // with the ticket
    bytes = turns + turns_bytes;
  }
};

std::size_t workspace(const AttentionBackwardProblem& p, int /*workers*/) {
  const Variant& v = variant_for(p);
  return workspace_of(p, v, parts_of_group(p, v));
}

std::string describe(const AttentionBackwardProblem& p, int /*workers*/) {
  const Variant& v = variant_for(p);
  const int parts = parts_of_group(p, v);
  return text(v.name, ": tiles of ", v.tile_q, " rows x ", v.tile_k, " keys",
              has_planes(p)    ? ", with ALiBi, bias or mask"
              : p.softcap != 0 ? ", with a softcap"
                               : "",
              parts > 1 ? text(", ", parts, " CTAs share the heads of a kv head") : "", ", ",
              p.B * p.Hkv * parts * ((p.Sk + v.tile_k - 1) / v.tile_k), " tiles of keys",
              rounds_d_o(p) ? ", d_o rounded first" : "", p.accumulate ? ", added to what is there" : "");
}

void launch(const AttentionBackwardProblem& p, const Runtime& runtime) {
  const Variant& v = variant_for(p);
  launch_call(p, v, parts_of_group(p, v), {}, runtime);
}

}  // namespace

std::span<const Variant> sm90::attention_bwd::variants(DType type) {
  return variants_of<Instance, kTypes, kVariants>(type);
}

Refusal sm90::attention_bwd::refuse_layout(const AttentionBackwardProblem& p) {
  if (Refusal reason = refuse_unmappable(p); !reason.empty()) return reason;
  if (p.B > 0 && p.q_rows > 0) {
    for (const auto& [name, x] : {std::pair{"d_o", rounds_d_o(p) ? Operand{} : p.d_o}, {"dq", p.dq}}) {
      if (Refusal reason = refuse_unmappable(name, x); !reason.empty()) return reason;
    }
  }
  if (p.B > 0 && p.k_rows > 0) {
    for (const auto& [name, x] : {std::pair{"dk", p.dk}, {"dv", p.dv}}) {
      if (Refusal reason = refuse_unmappable(name, x); !reason.empty()) return reason;
    }
  }
  if (p.q_rows > kMaxLength || p.k_rows > kMaxLength) return text("q and k must have fewer than ", kMaxLength, " rows");
  constexpr std::int64_t kMaxTiles = 1 << 30, kFewest = 64;  // rows and keys of the smallest blocks
  if (p.B * p.H > kMaxTiles / std::max<std::int64_t>((std::max(p.Sq, p.Sk) + kFewest - 1) / kFewest, 1)) {
    return text("q or k have more tiles than ", kMaxTiles);
  }
  return "";
}

int sm90::attention_bwd::parts_of_group(const AttentionBackwardProblem& p, const Variant& v) {
  const std::int64_t enough = 4 * current_device().multiprocessors, tiles = (p.Sk + v.tile_k - 1) / v.tile_k;
  std::int64_t parts = 1;
  while (p.G % (2 * parts) == 0 && p.B * p.Hkv * tiles * parts < enough) parts *= 2;
  return static_cast<int>(parts);
}

std::size_t sm90::attention_bwd::workspace_of(const AttentionBackwardProblem& p, const Variant& v, int parts) {
  return static_cast<std::size_t>(Layout(p, v, parts).bytes);
}

void sm90::attention_bwd::launch_call(const AttentionBackwardProblem& p, const Variant& v, int parts,
                                      const TileLists& lists, const Runtime& runtime) {
  const auto stream = static_cast<cudaStream_t>(runtime.stream);
  auto* const memory = static_cast<std::byte*>(runtime.workspace.data);
  const Layout layout(p, v, parts);
  const auto floats = [&](std::int64_t at) { return reinterpret_cast<float*>(memory + at); };
  const std::int64_t row_bytes = v.columns * static_cast<std::int64_t>(sizeof(float));
  const any::attention_bwd_rows::Rows rows = {
      .lse_log2 = floats(layout.lse_log2),
      .delta = floats(layout.delta),
      .largest = p.bias ? floats(layout.largest) : nullptr,
      .sums = reinterpret_cast<uint4*>(memory + layout.dq),
      .words_per_row = row_bytes / static_cast<std::int64_t>(sizeof(uint4)),
      .d_o = rounds_d_o(p) ? rounded_d_o(p, memory + layout.d_o) : Operand{},
  };
  if (p.B > 0 && p.q_rows > 0) launch_rows(p, rows, stream);
  if (p.dsink) launch_sink_gradient(p, rows, stream);
  if (p.B == 0) return;

  Params params{};
  params.problem = p;
  params.lists = lists;
  const auto map = [&](const Operand& x, std::int64_t size, std::int64_t extent, std::int64_t heads,
                       std::int64_t batches, int box) {
    return make_tensor_map(extent > 0 ? x.data : p.k.data, p.dtype,  // of no rows, nothing is read
                           TensorMapShape<4>{.extent = {size, extent, heads, batches},
                                             .stride = {x.stride_s, x.stride_h, x.stride_b},
                                             .box = {64, box, 1, 1}});
  };
  const std::int64_t q_batches = p.cu_seqlens_q ? 1 : p.B, k_batches = p.cu_seqlens_k ? 1 : p.B;
  if (p.k_rows > 0) {
    params.q = map(p.q, p.D, p.q_rows, p.H, q_batches, v.tile_q);
    params.d_o = map(rows.d_o ? rows.d_o : p.d_o, p.Dv, p.q_rows, p.H, q_batches, v.tile_q);
    params.k = map(p.k, p.D, p.k_rows, p.Hkv, k_batches, v.tile_k);
    params.v = map(p.v, p.Dv, p.k_rows, p.Hkv, k_batches, v.tile_k);
  }
  const Window window = window_of(p);
  params.left = window.left;
  params.right = window.right;
  params.lse_log2 = rows.lse_log2;
  params.delta = rows.delta;
  params.largest = rows.largest;
  params.dq = floats(layout.dq);
  params.dk = floats(layout.dk);
  params.dv = floats(layout.dv);
  params.parts = parts;
  params.key_rows_per_head = key_rows_per_head(p);
  params.rows_per_head = rows_per_head(p);
  const std::int64_t tiles = (p.Sk + v.tile_k - 1) / v.tile_k;
  params.k_tiles = static_cast<int>(tiles);
  params.units = static_cast<int>(p.B * p.Hkv) * params.parts;
  // Half of the L2 cache for q, dO and the sums of dQ, of one head of a group: they come one after the other.
  const std::int64_t unit_bytes = p.Sq * (2 * (p.D + p.Dv) + row_bytes);
  params.section = static_cast<int>(
      std::clamp<std::int64_t>(current_device().l2_bytes / 2 / std::max<std::int64_t>(unit_bytes, 1), 1, params.units));
  if (p.deterministic) {
    std::byte* const turns = memory + layout.turns;
    check(cudaMemsetAsync(turns, 0, static_cast<std::size_t>(layout.turns_bytes), stream), "attention_backward");
    params.ticket = reinterpret_cast<int*>(turns);
    params.turns = params.ticket + 1;
    const bool band = params.left < kOpen || params.right < kOpen;
    params.chunk = band || lists.places != nullptr ? 0 : std::max(current_device().multiprocessors / 2, 1);
    // Chunks of one unit wait for each other: others between them.
    if (params.chunk > 0 && params.chunk < params.k_tiles) params.section = std::max(params.section, 4);
  }
  params.scale_log2 = p.scale * kLog2e;
  params.softcap_inside = p.softcap > 0 ? 2 * params.scale_log2 / p.softcap : 0;
  params.softcap_log2 = p.softcap * kLog2e;
  const std::int64_t grid = p.cu_seqlens_k ? (p.k_rows / v.tile_k + p.B) * p.Hkv * params.parts : tiles * params.units;
  if (p.k_rows > 0) v.launch(params, static_cast<int>(grid), stream);
  if (p.dq && p.q_rows > 0) {
    v.round(params,
            {.data = params.dq,
             .parts = 1,
             .of_keys = false,
             .heads = p.H,
             .rows_per_head = params.rows_per_head,
             .longest = p.Sq,
             .to = p.dq,
             .size = static_cast<int>(p.D),
             .factor = p.scale},
            stream);
  }
  const auto round_parts = [&](const float* sums, const Operand& to, std::int64_t size, float factor) {
    if (!to || params.parts == 1 || p.k_rows == 0) return;
    v.round(params,
            {.data = sums,
             .parts = params.parts,
             .of_keys = true,
             .heads = p.Hkv,
             .rows_per_head = params.key_rows_per_head,
             .longest = p.Sk,
             .to = to,
             .size = static_cast<int>(size),
             .factor = factor},
            stream);
  };
  round_parts(params.dk, p.dk, p.D, p.scale);
  round_parts(params.dv, p.dv, p.Dv, 1.0f);
  if (p.dbias) launch_bias_gradient(p, rows, stream);
}

const AttentionBackwardKernel kSm90AttentionBackward = {
    .name = "sm90",
    .method = "flash",
    .device = Device::cuda,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe,
    .extras = kPiece | kFloat32Out | kFloat32Gradients,
    .costs = kCosts,
};

}  // namespace heddle::cuda
