// The candidate "sm90_decode": what it takes, how a call is cut up, and the launch.
#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

#include "core/check.h"
#include "cuda/assumed_gpu.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"
#include "cuda/common/tensor_map.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "cuda/sm90/attention_decode/tiles.h"
#include "cuda/sm90/attention_decode/variants.h"

namespace heddle::cuda {
namespace {

using namespace sm90::attention_decode;

constexpr std::int64_t kMaxLength = kOpen / 2, kMaxQueries = 16;
constexpr int kBlockRows = 128;      // keys of all heads of a block
constexpr int kInvariantKeys = 512;  // an item's keys where the cut must not depend on the batch
constexpr int kSharedBytes = kHopperSharedBytes, kQueryBytes = 34 * 1024;

bool narrow(const AttentionProblem& p) { return p.k.dtype == DType::f8e4m3; }

// Keys that one copy may bring: those of a page, or any number.
int keys_together(const AttentionProblem& p) {
  return p.page_table ? static_cast<int>(std::gcd(p.page_size, std::int64_t{kBlockRows})) : kBlockRows;
}

// Scales differ from key to key, or are found for each.
bool scales_by_key(const AttentionProblem& p) {
  const auto differ = [&](const Scales& x) { return x && (x.stride_s != 0 || (p.page_table && x.stride_b != 0)); };
  return differ(p.k_scale) || differ(p.v_scale) || p.append.finds_k_scale || p.append.finds_v_scale;
}

// Rows of a kv head that one unit may have.
int row_limit(const Variant& v) {
  return std::min(kConsumerWarps * kRowTile * v.tiles.row_tiles, v.tiles.head == 256 ? 64 : 256);
}

bool takes(const Variant& v, const AttentionProblem& p) {
  const std::int64_t rows = p.G * p.Sq;
  if (std::max(p.D, p.Dv) > v.tiles.head || v.tiles.key_scales != (narrow(p) && scales_by_key(p))) return false;
  // A warpgroup's keys lie side by side, so a unit over pages has one head; the smallest are better copied for several.
  // And a unit that appends must have all rows of its kv heads.
  if (v.tiles.warpgroups && (keys_together(p) < kKeyTile || (p.append && rows > row_limit(v)))) return false;
  return rows > kRowTile || (v.tiles.row_tiles == 1 && !v.tiles.warpgroups);
}

const Variant& variant_for(const AttentionProblem& p) {
  return first_that(variants(narrow(p) ? DType::f8e4m3 : p.dtype), [&](const Variant& v) { return takes(v, p); });
}

Refusal supports(const AttentionProblem& p) {
  if (Refusal reason = refuse_other_than_hopper(); !reason.empty()) return reason;
  if (p.dtype == DType::f32) return "it takes float16, bfloat16 and float8_e4m3fn, not float32";
  if (p.Sq > kMaxQueries) return text("it is for at most ", kMaxQueries, " queries a sequence; found ", p.Sq);
  if (p.D % 8 != 0 || p.Dv % 8 != 0) return text("head sizes must be multiples of 8; found ", p.D, " and ", p.Dv);
  if (Refusal reason = refuse_unmappable(p); !reason.empty()) return reason;
  if (p.k_rows > 0 && narrow(p) && (p.D % 16 != 0 || p.Dv % 16 != 0)) {
    return text("head sizes of float8_e4m3fn must be multiples of 16; found ", p.D, " and ", p.Dv);
  }
  if (p.Sq > kMaxLength || p.Sk > kMaxLength) return text("q and k must have fewer than ", kMaxLength, " rows");
  if (p.B * p.Hkv * std::max<std::int64_t>(p.Sk / kKeyTile, 1) * p.G > (std::int64_t{1} << 30)) {
    return "the batch has too many keys: more than 2^34 over all query heads";
  }
  if (p.append && p.G * p.Sq > row_limit(variant_for(p))) {
    return text("it appends keys for at most ", row_limit(variant_for(p)), " query rows of a kv head; found ",
                p.G * p.Sq);
  }
  if (p.dropout.p != 0) return "it has no dropout";
  if (Refusal reason = refuse_piece_of_few_rows(p); !reason.empty()) return reason;
  for (const std::int64_t stride : {p.k_scale.stride_s, p.v_scale.stride_s}) {
    if (stride < 0 || stride > std::numeric_limits<int>::max()) {
      return text("scales of neighbouring keys must lie fewer than 2^31 elements apart; found ", stride);
    }
  }
  return "";
}

// All sequences are as long as the tensors, and none has a position of its own.
bool equal_lengths(const AttentionProblem& p) {
  return !p.cu_seqlens_q && !p.cu_seqlens_k && !p.seqused_q && !p.seqused_k && !p.cache_leftpad && !p.piece();
}

int ceil_div(std::int64_t a, std::int64_t b) { return static_cast<int>((a + b - 1) / b); }
int log2_of(int power) { return std::countr_zero(static_cast<unsigned>(power)); }
int ceil_to(int a, int b) { return (a + b - 1) / b * b; }

// Keys of the smallest blocks that are worth a copy, or that a product takes.
int least_block(const Variant& v) { return std::max(2 * kKeyTile, v.keys); }

// Whether a cluster of CTAs shares each unit, and of how many: their merge costs a third of one through the workspace.
// The smallest one that needs no more blocks in turn than the largest; none if much of the chip would have nothing to
// do.
void choose_cluster(const AttentionProblem& p, const Variant& v, Plan& plan) {
  const int units = static_cast<int>(p.B) * plan.head_groups * plan.row_units;
  const int processors = current_device().multiprocessors;
  int most = std::min(kMaxCluster, processors / units);
  while (most > 1 && clusters_held(v.clusters_at_once, most) < units) --most;
  const std::int64_t keys = p.window_left < 0 ? p.Sk : std::min(p.Sk, p.window_left + p.Sq);
  if (most <= 1 || keys <= least_block(v)) return;
  int block = plan.block;
  while (block > least_block(v) && ceil_div(keys, block / 2) <= most) block /= 2;
  const int blocks = ceil_div(keys, block), in_turn = ceil_div(blocks, most), size = ceil_div(blocks, in_turn);
  if (size <= 1 || (in_turn > 2 && size < 8 && 10 * units * size < 9 * processors)) return;
  plan.block = block;
  plan.cluster = size;
  plan.lane_shift = log2_of(static_cast<int>(std::bit_ceil(static_cast<unsigned>(size))));
}

Plan plan_for(const AttentionProblem& p, const Variant& v) {
  Plan plan{};
  const int all_rows = static_cast<int>(p.G * p.Sq), processors = current_device().multiprocessors;
  const int tile_rows = kRowTile * v.tiles.row_tiles;  // of a warp
  plan.row_units = ceil_div(all_rows, row_limit(v));
  plan.rows = plan.row_units == 1 ? all_rows : row_limit(v);
  plan.row_groups =
      std::max(static_cast<int>(std::bit_ceil(static_cast<unsigned>(ceil_div(plan.rows, tile_rows)))), v.warps);

  const int page = keys_together(p);
  // Several kv heads beside each other make a row of the cache one piece of memory; fewer make more units to share out,
  // and fewer parts of each to merge.
  const bool interleaved = p.k.stride_h <= p.k.stride_s, small_pages = page < kKeyTile;
  // With many rows, what a CTA has to merge at its end counts for more; and a warpgroup's keys lie side by side.
  const bool many_rows = v.warps > 1 && (page < v.keys || 2 * plan.rows > kConsumerWarps / 2 * kRowTile);
  const int most = !interleaved || many_rows ? 1 : p.batch_invariant && !small_pages ? 2 : kConsumerWarps;
  const std::int64_t units = small_pages ? 8 : processors / 2;
  const int q_bytes = ceil_to(plan.rows, v.q_rows) * v.q_pitch;  // of a head
  plan.heads = 1;
  while (2 * plan.heads <= most && 2 * plan.heads * plan.row_groups <= kConsumerWarps &&
         p.Hkv % (2 * plan.heads) == 0 && 2 * plan.heads * q_bytes <= kQueryBytes &&
         (p.batch_invariant || p.B * p.Hkv / (2 * plan.heads) * plan.row_units >= units)) {
    plan.heads *= 2;
  }
  plan.head_groups = static_cast<int>(p.Hkv / plan.heads);
  plan.key_splits = kConsumerWarps / (plan.heads * plan.row_groups);
  plan.block = v.warps > 1 ? plan.key_splits * v.keys : kBlockRows / plan.heads;
  plan.cluster = 1;
  if (!p.batch_invariant && (p.B == 1 || equal_lengths(p))) choose_cluster(p, v, plan);
  // Few keys: smaller blocks, for more CTAs.
  while (plan.cluster == 1 && !p.batch_invariant && plan.block > least_block(v) &&
         p.B * plan.head_groups * plan.row_units * ceil_div(p.Sk, plan.block) * 10 < 9 * processors) {
    plan.block /= 2;
  }
  plan.q_offset = ceil_to(v.control_bytes, v.q_rows > 1 ? 1024 : 128);  // swizzled tiles begin at 1024
  plan.merge_offset = ceil_to(plan.q_offset + plan.heads * q_bytes, 128);
  plan.tiles_offset = ceil_to(plan.merge_offset + v.merge_bytes, 1024);
  for (;; plan.block /= 2) {
    plan.box = std::min(page, plan.block);
    plan.box_shift = log2_of(plan.box);
    // Of 8 neighbouring keys of a head, no two may lie in rows alike modulo 8.
    plan.box_pitch = plan.box * (plan.heads > 1 && plan.box < 8 ? plan.heads + 1 : plan.heads);
    plan.panel_bytes = ceil_to(plan.block / plan.box * plan.box_pitch, 8) * 128;
    plan.stages = std::min((kSharedBytes - plan.tiles_offset) / (v.panels * plan.panel_bytes), 16);
    if (plan.stages >= 4 || plan.block == v.keys) break;
  }
  const int partial = 4 * plan.heads * plan.rows * static_cast<int>(p.Dv + 2) + 16;  // of a CTA, as in merge.cuh
  if (partial > plan.stages * v.panels * plan.panel_bytes) plan.cluster = 1;
  plan.shared_bytes = plan.tiles_offset + plan.stages * v.panels * plan.panel_bytes;
  plan.key_splits = std::min(plan.key_splits, plan.block / v.keys);
  plan.item_blocks = p.batch_invariant ? std::max(kInvariantKeys / plan.block, 2) : 1;
  plan.block_shift = log2_of(plan.block);
  plan.row_shift = log2_of(plan.row_groups);
  plan.item_shift = log2_of(plan.item_blocks);
  plan.by_rows = Divisor(static_cast<unsigned>(plan.rows));
  plan.by_group = Divisor(static_cast<unsigned>(p.G));
  plan.by_quads = Divisor(static_cast<unsigned>(std::max<std::int64_t>(p.Dv / 4, 1)));

  const std::int64_t items =
      p.B * plan.head_groups * plan.row_units * std::max(ceil_div(ceil_div(p.Sk, plan.block) + 1, plan.item_blocks), 1);
  plan.ctas = plan.cluster > 1 ? static_cast<int>(p.B) * plan.head_groups * plan.row_units * plan.cluster
                               : static_cast<int>(std::min<std::int64_t>(items, processors));
  const int quads = plan.heads * plan.rows * ceil_div(p.Dv, 4);
  while (plan.merge_shift < 3 && quads << (plan.merge_shift + 1) <= 32 * kConsumerWarps) ++plan.merge_shift;
  plan.cluster_items = ceil_div(quads, plan.cluster);
  plan.slot_words = 3 * quads;
  plan.slots = plan.item_blocks > 1 ? static_cast<int>(items) : 2 * plan.ctas;
  return plan;
}

constexpr CostLine<AttentionProblem> kCosts[] = {
    {"sm90_decode", {5.1e-6, 172e12, 4.48e12}, {DType::bf16, DType::bf16, Precision::f32, 64, 32, 8, 1, 8192, 128}},
    {"sm90_decode rows", {16.5e-6, 357e12, 0}, {DType::bf16, DType::bf16, Precision::f32, 64, 64, 8, 16, 8192, 128}},
};

double estimate(const AttentionProblem& p, int /*workers*/) {
  const Cost& cost = cost_of(kCosts[0]);
  const Cost& by_warpgroups = cost_of(kCosts[1]);
  double keys = static_cast<double>(p.Sk);
  if (p.window_left >= 0) keys = std::min(keys, static_cast<double>(p.window_left + p.Sq));
  const auto heads = static_cast<double>(p.B * p.Hkv);
  const double bytes = heads * keys * static_cast<double>((p.D + p.Dv) * static_cast<std::int64_t>(size_of(p.k.dtype)));
  const Variant& v = variant_for(p);
  const int rows = ceil_to(static_cast<int>(p.G * p.Sq), v.warps * kRowTile);
  const double flops = 2 * heads * keys * rows * static_cast<double>(p.D + p.Dv);
  if (v.warps == 1) return cost.fixed + std::max(bytes / cost.bytes, flops / cost.flops);
  constexpr double kShareOfFew = 0.92;  // of the bandwidth with few rows: what their merge costs
  return cost.fixed + std::max(bytes / (kShareOfFew * cost.bytes), flops / by_warpgroups.flops);
}

std::size_t workspace(const AttentionProblem& p, int /*workers*/) {
  if (p.B == 0 || p.q_rows == 0) return 0;
  const Plan plan = plan_for(p, variant_for(p));
  return std::size_t{16} * static_cast<std::size_t>(plan.slots) * static_cast<std::size_t>(plan.slot_words);
}

std::string describe(const AttentionProblem& p, int /*workers*/) {
  if (p.B == 0 || p.q_rows == 0) return "nothing to launch";
  const Variant& v = variant_for(p);
  const Plan plan = plan_for(p, v);
  return text(
      v.name, ": ", v.warps == 1 ? "products by warps" : "products by warpgroups",
      narrow(p) && scales_by_key(p) ? ", scales by key" : "", ", blocks of ", plan.block, " keys of ",
      plan.heads == 1 ? "a kv head" : text(plan.heads, " kv heads"), " with ", plan.rows,
      plan.rows == 1 ? " row, " : " rows, ", plan.stages, " stages, ", plan.ctas, " CTAs",
      plan.cluster > 1 ? text(" in clusters of ", plan.cluster, " that share the keys") : ", keys split evenly");
}

void launch(const AttentionProblem& p, const Runtime& runtime) {
  if (p.B == 0 || p.q_rows == 0) return;
  const Variant& v = variant_for(p);
  Params params{};
  params.problem = p;
  params.plan = plan_for(p, v);
  const Plan& plan = params.plan;
  const auto cache_map = [&](const Operand& x, std::int64_t size) {
    const std::int64_t rows = p.k_rows, batches = p.k_batches;
    const bool any = rows > 0 && x.data != nullptr;  // else nothing is read
    return make_tensor_map(any ? x.data : p.q.data, x.dtype,
                           TensorMapShape<4>{.extent = {size, rows, p.Hkv, batches},
                                             .stride = {x.stride_s, x.stride_h, x.stride_b},
                                             .box = {v.panel_elements, plan.box, plan.heads, 1},
                                             .streamed = true});
  };
  params.k = cache_map(p.k, p.D);
  params.v = cache_map(p.v, p.Dv);
  params.slots = static_cast<uint4*>(runtime.workspace.data);
  params.band = RowBand(p);
  params.equal_lengths = equal_lengths(p);
  if (params.equal_lengths) {
    params.equal = span_of(p, plan, params.band, 0);
    params.equal_total = params.equal.items * plan.head_groups * plan.row_units * static_cast<int>(p.B);
    params.equal_share = ceil_div(params.equal_total, plan.ctas);
  }
  params.copies_q = !p.append;
  params.plain = p.softcap == 0 && !p.alibi && !p.bias && !p.mask && !p.draft_mask;
  v.launch(params, plan.ctas, static_cast<cudaStream_t>(runtime.stream));
}

}  // namespace

std::span<const Variant> sm90::attention_decode::variants(DType type) {
  return type == DType::f8e4m3 ? variants_of<Instance, kE4m3Types, kE4m3Variants>(type)
                               : variants_of<Instance, k16BitTypes, k16BitVariants>(type);
}

const AttentionForwardKernel kSm90AttentionDecode = {
    .name = "sm90_decode",
    .method = "flash",
    .device = Device::cuda,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe,
    .extras = heddle::kE4m3 | kDraftMask | kAppend | kPiece | kFloat32Out | kSteps,
    .for_decode = true,
    .costs = kCosts,
};

}  // namespace heddle::cuda
