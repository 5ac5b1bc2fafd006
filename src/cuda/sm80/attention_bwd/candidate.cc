// The candidate "sm80" of the backward: what it takes, which instantiation, the workspace, and the launches.
#include <algorithm>
#include <limits>

#include "core/check.h"
#include "cuda/any/attention_bwd_rows/bias_gradient.h"
#include "cuda/any/attention_bwd_rows/launch.h"
#include "cuda/common/attention/window.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "cuda/sm80/attention_bwd/launch.h"
#include "cuda/sm80/attention_bwd/variants.h"
#include "problem/attended_pairs.h"

namespace heddle::cuda {
namespace {

using namespace sm80::attention_bwd;
using any::attention_bwd_rows::kRowTile;
using any::attention_bwd_rows::rounded_d_o;
using any::attention_bwd_rows::rounded_d_o_bytes;
using any::attention_bwd_rows::rounds_d_o;
using any::attention_bwd_rows::rows_per_head;
using any::attention_bwd_rows::statistics_bytes;

using sm80::attention::kMaxLength;
using sm80::attention::kMaxPiece;

constexpr std::int64_t kMaxTiles = 1 << 30;

const Variants& variants_for(const AttentionProblem& p) {
  const int products = sm80::attention::products_of(p);
  return first_that(variants(p.dtype),
                    [&](const Variants& v) { return v.products == products && std::max(p.D, p.Dv) <= v.head; });
}

const Variant& variant_for(const AttentionProblem& p) {
  const Variants& variants = variants_for(p);
  const bool plain = sm80::attention::plain_scores(p);
  const auto fits = [](const Variant& v) {
    return v.shared_bytes <= static_cast<std::size_t>(current_device().shared_memory);
  };
  // Rows up to the smaller tile would leave half of the larger one idle. Of packed sequences only the longest is known,
  // and what a sequence gets must not follow from it.
  const bool long_rows = p.Sq > variants.plain.tile_q || p.cu_seqlens_q.given;
  if (plain && fits(variants.large) && long_rows) return variants.large;
  if (plain && fits(variants.plain)) return variants.plain;
  return fits(variants.options) ? variants.options : variants.everywhere;
}

std::int64_t tiles(std::int64_t length, std::int64_t tile) { return (length + tile - 1) / tile; }

Refusal supports(const AttentionBackwardProblem& p) {
  if (Refusal reason = refuse_before_ampere(); !reason.empty()) return reason;
  if (p.Sq > kMaxLength || p.Sk > kMaxLength) return text("sequences must be no longer than ", kMaxLength);
  if (p.piece() || p.stepped()) {
    if (p.dropout.p > 0 || p.dbias) {
      return "it has no dropout and no gradient of a bias beside q_offset, key_offset and steps";
    }
    if (std::max({p.Sq * p.q_step, p.Sk * p.key_step, p.window_left, p.window_right}) > kMaxPiece) {
      return text("sequences and windows must be no longer than ", kMaxPiece, " positions beside q_offset, key_offset ",
                  "and steps");
    }
    // Each query tile must know how many tiles of keys add to it: all between the first and the last.
    const Window window = window_of(p);
    if (p.deterministic && std::max(p.q_step, p.key_step) > std::int64_t{window.left} + window.right + 1) {
      return "it has no deterministic sums where rows or keys stand farther apart than the window is wide";
    }
  }
  const Variant& v = variant_for(p);
  // 16 rows are the fewest that a block of any of the kernels takes.
  if (p.B * p.H > kMaxTiles / std::max<std::int64_t>({tiles(p.Sq, 16), tiles(p.Sk, v.tile_k), 1})) {
    return text("q or k have more tiles than 2^30");
  }
  return refuse_bias_gradient(p);
}

constexpr CostLine<AttentionBackwardProblem> kCosts[] = {
    {"sm80_bwd d64", {10.6e-6, 279e12, 0}, {DType::bf16, DType::bf16, Precision::f32, 4, 32, 32, 4096, 4096, 64}},
    {"sm80_bwd d128", {11.1e-6, 295e12, 0}, {DType::bf16, DType::bf16, Precision::f32, 4, 16, 16, 4096, 4096, 128}},
    {"sm80_bwd d256", {13.8e-6, 295e12, 0}, {DType::bf16, DType::bf16, Precision::f32, 4, 8, 8, 4096, 4096, 256}},
    {"sm80_bwd f32", {12.7e-6, 43.1e12, 0}, {DType::f32, DType::f32, Precision::f32, 2, 16, 16, 2048, 2048, 128}},
    {"sm80_bwd tf32", {10.4e-6, 74.4e12, 0}, {DType::f32, DType::f32, Precision::tf32, 2, 16, 16, 2048, 2048, 128}},
};

double estimate(const AttentionBackwardProblem& p, int /*workers*/) {
  const std::int64_t size = std::max(p.D, p.Dv);
  const Cost& cost = cost_of(kCosts[p.dtype == DType::f32 ? sm80::attention::uses_tf32(p) ? 4 : 3
                                    : size <= 64          ? 0
                                    : size <= 128         ? 1
                                                          : 2]);
  // Five products of the forward's two, and two more for dbias.
  const double products = p.dbias ? 7.0 : 5.0;
  const double flops = products * static_cast<double>(p.D + p.Dv) * attended_pairs(p) * static_cast<double>(p.B * p.H);
  return cost.fixed + flops / cost.flops;
}

// Where keys stand for many positions each, there are few tiles of them, each with many rows: the heads of a group are
// then shared by as many CTAs. Lengths have no part in it, so that a sequence has the bits that it has alone.
std::int64_t split_heads(const AttentionProblem& p) {
  return tiles(p.G, std::clamp<std::int64_t>(p.key_step, 1, std::max<std::int64_t>(p.G, 1)));
}
std::int64_t splits(const AttentionProblem& p) { return std::max<std::int64_t>(tiles(p.G, split_heads(p)), 1); }

// Where everything lies in the workspace, in bytes from its begin.
struct Layout {
  std::int64_t lse_log2 = 0, delta, largest, dq_sums, key_sums, d_o, turns, bytes;

  Layout(const AttentionBackwardProblem& p, const Variant& v) {
    const std::int64_t rows = p.H * rows_per_head(p), words = sizeof(float);
    delta = lse_log2 + statistics_bytes(p);
    largest = delta + statistics_bytes(p);
    dq_sums = largest + (p.bias ? statistics_bytes(p) : 0);
    key_sums = dq_sums + (p.dq ? rows * v.head_size * words : 0);
    d_o = key_sums + key_sums_bytes(p, v);
    turns = d_o + rounded_d_o_bytes(p);
    bytes = turns + turns_bytes(p, v);
  }

  static std::int64_t key_sums_bytes(const AttentionBackwardProblem& p, const Variant& v) {
    if (splits(p) == 1 || !(p.dk || p.dv)) return 0;
    return p.B * p.Hkv * splits(p) * tiles(p.Sk, v.tile_k) * 2 * v.tile_k * v.head_size *
           static_cast<std::int64_t>(sizeof(float));
  }

  // A counter for each query tile of each head, and the ticket.
  static std::int64_t turns_bytes(const AttentionBackwardProblem& p, const Variant& v) {
    return p.dq && p.deterministic ? (p.H * rows_per_head(p) / v.tile_q + 1) * static_cast<std::int64_t>(sizeof(int))
                                   : 0;
  }
};

std::size_t workspace(const AttentionBackwardProblem& p, int /*workers*/) { return workspace_of(p, variant_for(p)); }

// ticket: the counters of a deterministic sum, or null.
Params params_for(const AttentionBackwardProblem& p, const Variant& v, const any::attention_bwd_rows::Rows& rows,
                  int* ticket) {
  Params params{};
  params.scores = sm80::attention::score_params(p);
  params.d_o = rows.d_o ? rows.d_o : p.d_o;
  params.dq = p.dq;
  params.dk = p.dk;
  params.dv = p.dv;
  params.lse_log2 = rows.lse_log2;
  params.delta = rows.delta;
  params.largest = rows.largest;
  params.dq_sums = p.dq ? reinterpret_cast<float*>(rows.sums) : nullptr;
  params.rows_per_head = rows_per_head(p);
  params.units = static_cast<int>(p.B * p.Hkv * splits(p));
  params.splits = Divisor(static_cast<unsigned>(splits(p)));
  params.split_heads = static_cast<int>(split_heads(p));
  params.last_rows_first = splits(p) > 1 && ticket == nullptr;
  params.k_tiles = static_cast<int>(tiles(p.Sk, v.tile_k));
  params.q_tiles = static_cast<int>(tiles(p.Sq, v.tile_q));
  params.kv_heads = Divisor(static_cast<unsigned>(p.Hkv));
  params.ticket = ticket;
  params.turns = ticket != nullptr ? ticket + 1 : nullptr;
  params.last_keys_first = ticket != nullptr;
  // With a band, tiles differ in cost, and those of several heads are dealt out by it; where they take turns at the
  // rows of a head, other heads go on meanwhile. Half of the L2 cache for q, dO and the sums of dQ.
  const bool band = has_band(p);
  const std::int64_t element = static_cast<std::int64_t>(size_of(p.dtype)),
                     row = (p.D + p.Dv) * element + v.head_size * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t heads = std::clamp<std::int64_t>(
      current_device().l2_bytes / 2 / std::max<std::int64_t>(params.split_heads * p.Sq * row, 1), 1,
      std::max(params.units, 1));
  params.section = Divisor(static_cast<unsigned>(band || params.turns != nullptr ? heads : 1));
  params.section_tiles = Divisor(std::max(params.section.divisor * static_cast<unsigned>(params.k_tiles), 1u));
  const std::int64_t piece = 16 / element;
  const bool pieces = p.D % piece == 0 && p.Dv % piece == 0;
  const auto absent_or_aligned = [](const Operand& x) { return !x || has_rows_of_16_bytes(x); };
  params.in_pieces = pieces && has_rows_of_16_bytes(p.q) && has_rows_of_16_bytes(p.k) && has_rows_of_16_bytes(p.v) &&
                     has_rows_of_16_bytes(params.d_o);
  params.out_pieces = pieces && absent_or_aligned(p.dq) && absent_or_aligned(p.dk) && absent_or_aligned(p.dv);
  params.accumulate = p.accumulate;
  params.keep_scale = 1.0f / (1.0f - p.dropout.p);
  params.dk_scale = p.scale;
  params.dv_scale = params.keep_scale;
  params.dbias = p.dbias;
  params.bias_batch = p.bias_batch;
  params.bias_heads = p.bias_heads;
  params.bias_rows = p.bias_rows;
  params.bias_columns = p.bias_columns;
  return params;
}

std::string describe(const AttentionBackwardProblem& p, int /*workers*/) {
  const Variants& variants = variants_for(p);
  const Variant& v = variant_for(p);
  return text(variants.name, ": tiles of ", v.tile_q, " rows x ", v.tile_k, " keys, ",
              &v == &variants.large || &v == &variants.plain ? "without" : "with all", " score options, ",
              v.shared_bytes, " bytes of shared memory, ", p.B * p.H * tiles(p.Sk, v.tile_k), " tiles of keys",
              rounds_d_o(p) ? ", d_o rounded first" : "", p.accumulate ? ", added to what is there" : "");
}

void launch(const AttentionBackwardProblem& p, const Runtime& runtime) { launch_call(p, variant_for(p), {}, runtime); }

}  // namespace

std::span<const Variants> sm80::attention_bwd::variants(DType type) {
  return type == DType::f32 ? variants_of<Instance, kF32Types, kF32Variants>(type)
                            : variants_of<Instance, k16BitTypes, k16BitVariants>(type);
}

std::size_t sm80::attention_bwd::workspace_of(const AttentionBackwardProblem& p, const Variant& v) {
  return static_cast<std::size_t>(Layout(p, v).bytes);
}

void sm80::attention_bwd::launch_call(const AttentionBackwardProblem& p, const Variant& v, const TileLists& lists,
                                      const Runtime& runtime) {
  const auto stream = static_cast<cudaStream_t>(runtime.stream);
  auto* const memory = static_cast<std::byte*>(runtime.workspace.data);
  const Layout layout(p, v);
  const any::attention_bwd_rows::Rows rows = {
      .lse_log2 = reinterpret_cast<float*>(memory + layout.lse_log2),
      .delta = reinterpret_cast<float*>(memory + layout.delta),
      .largest = p.bias ? reinterpret_cast<float*>(memory + layout.largest) : nullptr,
      .sums = p.dq ? reinterpret_cast<uint4*>(memory + layout.dq_sums) : nullptr,
      .words_per_row = v.head_size / 4,
      .d_o = rounds_d_o(p) ? rounded_d_o(p, memory + layout.d_o) : Operand{},
  };
  if (p.B > 0) launch_rows(p, rows, stream);
  if (p.dsink) launch_sink_gradient(p, rows, stream);
  if (p.B == 0) return;

  const std::int64_t turns_bytes = Layout::turns_bytes(p, v);
  int* const ticket = turns_bytes > 0 ? reinterpret_cast<int*>(memory + layout.turns) : nullptr;
  if (ticket != nullptr) {
    check(cudaMemsetAsync(ticket, 0, static_cast<std::size_t>(turns_bytes), stream), "attention_backward");
  }
  Params params = params_for(p, v, rows, ticket);
  params.scores.lists = lists;
  if (Layout::key_sums_bytes(p, v) > 0) params.key_sums = reinterpret_cast<float*>(memory + layout.key_sums);
  if (p.dq || p.dk || p.dv) v.launch(params, stream);
  if (params.key_sums != nullptr) v.launch_finish_keys(params, stream);
  if (p.dq) v.launch_finish_dq(params, stream);
  if (p.dbias) launch_bias_gradient(p, rows, stream);
}

Refusal refuse_bias_gradient(const AttentionBackwardProblem& p) {
  const Variant& v = variants_for(p).everywhere;
  if (p.dbias && p.bias_batch * p.bias_heads >
                     kMaxTiles / std::max<std::int64_t>(tiles(p.Sq, v.tile_q) * tiles(p.Sk, v.tile_k), 1)) {
    return text("bias has more tiles than 2^30");
  }
  return "";
}

void launch_bias_gradient(const AttentionBackwardProblem& p, const any::attention_bwd_rows::Rows& rows,
                          cudaStream_t stream) {
  const Variants& variants = variants_for(p);
  variants.launch_dbias(params_for(p, variants.everywhere, rows, nullptr), stream);
}

const AttentionBackwardKernel kSm80AttentionBackward = {
    .name = "sm80",
    .method = "flash",
    .device = Device::cuda,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe,
    .extras = kPiece | kSteps | kFloat32Out | kFloat32Gradients,
    .costs = kCosts,
};

}  // namespace heddle::cuda
