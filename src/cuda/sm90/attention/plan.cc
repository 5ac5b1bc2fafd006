#include "cuda/sm90/attention/plan.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/check.h"
#include "cuda/common/attention/log2.h"
#include "cuda/common/attention/window.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"
#include "cuda/common/tensor_map.h"
#include "cuda/sm90/attention/tiles.h"

namespace heddle::cuda::sm90::attention {
namespace {

constexpr std::int64_t kMaxLength = kOpen / 2;
constexpr std::int64_t kMaxTiles = 1 << 30;
constexpr std::int64_t kMaxPiece = kOpen / 4;    // positions of sequences and windows of a piece
constexpr std::int64_t kFewestRows = 2 * kRows;  // of a tile: no variant has fewer than two warpgroups

}  // namespace

Refusal refuse_layout(const AttentionProblem& p) {
  if (Refusal reason = refuse_unmappable(p); !reason.empty()) return reason;
  if (p.q_rows > kMaxLength || p.k_rows > kMaxLength) return text("q and k must have fewer than ", kMaxLength, " rows");
  // Heads share tiles only where that makes fewer.
  if (p.B * p.H > kMaxTiles / std::max<std::int64_t>((p.Sq + kFewestRows - 1) / kFewestRows, 1)) {
    return text("q has more tiles of ", kFewestRows, " rows than ", kMaxTiles);
  }
  return "";
}

Refusal refuse_positions(const AttentionProblem& p) {
  if (std::max({p.Sq * p.q_step, p.Sk * p.key_step, p.window_left, p.window_right}) > kMaxPiece) {
    return text("sequences and windows must be no longer than ", kMaxPiece,
                " positions beside q_offset and key_offset");
  }
  const Window window = window_of(p);
  if (p.q_step > std::int64_t{window.left} + window.right + 1) {
    return "it has no rows that stand farther apart than the window is wide";
  }
  return "";
}

Plan make_plan(const AttentionProblem& p, int consumers) {
  const auto tiles = [&](int pack) {
    const std::int64_t positions = std::int64_t{consumers} * (kRows / pack);
    return (p.Sq + positions - 1) / positions * (p.H / pack);
  };
  // The heads of a group share tiles where that takes fewer of them: short q, mostly.
  const int group = static_cast<int>(std::min<std::int64_t>(p.G, kRows));
  const int pack = p.G == group && tiles(group) < tiles(1) ? group : 1;
  const bool uneven = p.cu_seqlens_q.given || p.cu_seqlens_k || p.seqused_k || p.seqused_q;
  // Below, dealing tiles out in turn balances well enough, and costs no counter.
  return plan_with(p, consumers, pack, uneven || (has_band(p) && p.Sk > (p.D + p.Dv > 256 ? 512 : 1024)));
}

Plan plan_with(const AttentionProblem& p, int consumers, int pack, bool dynamic) {
  Plan plan{};
  plan.dynamic = dynamic;
  plan.pack = pack;
  plan.positions = kRows / plan.pack;
  plan.units = static_cast<int>(p.H / plan.pack);
  const int rows = consumers * plan.positions;
  plan.q_tiles = static_cast<int>((p.Sq + rows - 1) / rows);
  const bool packed = p.cu_seqlens_q.given;
  // Most of the L2 cache for keys and values; heads are a power of two, so that the last section is not a small one.
  const std::int64_t l2_bytes = std::int64_t{current_device().l2_bytes} * 13 / 16;
  const std::int64_t row_bytes =
      std::max<std::int64_t>((p.D + p.Dv) * static_cast<std::int64_t>(size_of(p.k.dtype)), 1);
  const std::int64_t rows_of_head = p.cu_seqlens_k.given ? p.k_rows : p.Sk * (packed ? p.B : 1);
  const auto heads = static_cast<std::uint64_t>(
      std::max<std::int64_t>(l2_bytes / row_bytes / std::max<std::int64_t>(rows_of_head, 1), 1));
  // Heads that share a bias or mask read it together, too.
  const auto shared = [](const Plane& x) { return x && x.stride_i != 0 && x.stride_h == 0; };
  const std::int64_t section = plan.dynamic || shared(p.bias) || shared(p.mask)
                                   ? static_cast<std::int64_t>(std::bit_floor(heads)) * (p.G / plan.pack)
                               : has_band(p) ? 4
                                             : 1;
  plan.section = static_cast<int>(std::min<std::int64_t>(section, packed ? plan.units : plan.units * p.B));
  plan.section_rows = static_cast<int>(std::min<std::int64_t>(l2_bytes / row_bytes, kMaxLength));
  return plan;
}

void fill(Params& params, const AttentionProblem& p, const Plan& plan, int tile_k) {
  const bool packed_q = p.cu_seqlens_q.given, packed_k = p.cu_seqlens_k.given;
  const std::int64_t q_rows = p.q_rows, k_rows = p.k_rows, q_batch = packed_q ? 1 : p.B, k_batch = packed_k ? 1 : p.B;
  const int columns = 128 / static_cast<int>(size_of(p.q.dtype));
  params.q =
      make_tensor_map(p.q.data, p.q.dtype,
                      TensorMapShape<5>{.extent = {p.D, plan.pack, q_rows, plan.units, q_batch},
                                        .stride = {p.q.stride_h, p.q.stride_s, p.q.stride_h * plan.pack, p.q.stride_b},
                                        .box = {columns, plan.pack, plan.positions, 1, 1}});
  const auto key_map = [&](const Operand& x, std::int64_t size) {
    return make_tensor_map(k_rows > 0 ? x.data : p.q.data, x.dtype,  // without keys, nothing is read
                           TensorMapShape<4>{.extent = {size, k_rows, p.Hkv, k_batch},
                                             .stride = {x.stride_s, x.stride_h, x.stride_b},
                                             .box = {columns, tile_k, 1, 1}});
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
  params.cu_seqlens_q = p.cu_seqlens_q.data;
  params.cu_seqlens_k = p.cu_seqlens_k.data;
  params.seqused_q = p.seqused_q.data;
  params.seqused_k = p.seqused_k.data;
  params.k_appended = static_cast<int>(p.k_appended);
  params.heads = plan.units;
  params.pack = plan.pack;
  params.pack_inverse = (65536 + plan.pack - 1) / plan.pack;
  params.kv_divisor = static_cast<int>(p.G / plan.pack);
  params.positions = plan.positions;
  params.q_tiles = plan.q_tiles;
  // How many tiles packed sequences have, only the kernel knows; this bounds them, and the CTAs worth starting.
  params.tiles = static_cast<int>(std::int64_t{plan.q_tiles} * plan.units * p.B);
  params.section = plan.section;
  params.section_rows = plan.section_rows;
  params.top_left = p.causal == Causal::top_left;
  const Window window = window_of(p);
  params.left = window.left;
  params.right = window.right;
  params.scale_log2 = p.scale * kLog2e;
  params.float_out = p.float32_out;
  params.piece = {.q_offset = p.q_offset.data,
                  .key_offset = p.key_offset.data,
                  .row_step = static_cast<int>(p.q_step),
                  .key_step = Divisor(static_cast<unsigned>(p.key_step))};
}

int* new_counter(void* memory, cudaStream_t stream) {
  auto* const counter = static_cast<int*>(memory);
  check(cudaMemsetAsync(counter, 0, sizeof(int), stream), "attention_forward");
  return counter;
}

}  // namespace heddle::cuda::sm90::attention
