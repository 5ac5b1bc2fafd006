#include "cuda/common/sparse_fwd/plan.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "core/check.h"
#include "cuda/common/attention/log2.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"

namespace heddle::cuda::sparse_fwd {
namespace {

using sparse::Arrays;
using sparse::ceil_div;

// Beside the outputs of branches no more than 2 GiB at 65536 positions of 64 heads.
constexpr std::size_t kPartialBytes = std::size_t{960} << 20;

// Lists of more rows are quicker by rows, which costs the same for a tile of 64 that is not full: 7 ns a tile of keys,
// where by keys a row and tile of keys takes 0.28 (an H100, 65536 positions).
constexpr std::int64_t kMostRowsByKeys = 24;
// Sequences of so few lists are steps of decoding: an index would take longer than they. Not what the whole call has,
// as a row's bits differ between the two ways, and must not depend on the other sequences.
constexpr std::int64_t kMostListsOfStep = 8;

// Together a warp has a list's rows, of which fewer than half would be empty.
constexpr std::int64_t kFewestRowsTogether = kGroupRows / 2 + 1;

bool goes_together(const SparseProblem& p, const sparse::Cut& cut) {
  // Of all rows that are stored: a sequence may be longer than a packed call says, and its blocks are marked all the
  // same.
  const std::int64_t blocks = ceil_div(p.k_rows, p.lists.block_size);
  if (p.page_table) return false;        // keys are read by their numbers in k
  if (p.lists.by_offsets) return false;  // a list may have any number of entries
  return cut.rows >= kFewestRowsTogether && cut.rows <= kGroupRows && p.lists.block_size >= kTileKeys &&
         p.lists.entries > 0 && p.lists.entries <= kMostEntriesTogether && blocks > 0 &&
         blocks <= kMostBlocksTogether && p.k_rows <= std::numeric_limits<int>::max() &&
         refuse_unmappable("k", p.k).empty() && refuse_unmappable("v", p.v).empty();
}

// Sequences of a call may be of any length up to Sq.
Way way_of(const SparseProblem& p, const sparse::Cut& cut, bool hopper) {
  if (cut.rows > kMostRowsByKeys || ceil_div(p.Sq, p.lists.query_rows) <= kMostListsOfStep) return Way::by_rows;
  return hopper && goes_together(p, cut) ? Way::together : Way::by_keys;
}

}  // namespace

Params params_of(const SparseProblem& p, const Plan& plan, Arrays& arrays) {
  Params params{};
  static_cast<sparse::Index&>(params) = sparse::index_of(p, plan, arrays, plan.way == Way::by_keys);
  params.by_rows = plan.way == Way::by_rows;
  params.parts = plan.parts;
  params.row_tiles = plan.row_tiles;
  params.block_log2 = std::bit_width(static_cast<unsigned>(p.lists.block_size)) - 1;
  // Of smaller pages, which refuse() has a sentence for, there is a plan as well.
  const auto blocks_of_page = static_cast<unsigned>(p.page_size / p.lists.block_size);
  if (p.page_table && blocks_of_page > 0) params.by_page = Divisor(blocks_of_page);
  params.scale_log2 = p.scale * kLog2e;
  params.o_pairs = p.o.dtype != DType::f32 && has_rows_of_16_bytes(p.o);
  if (plan.way != Way::by_keys && plan.parts == 1) return params;
  const std::int64_t parts = plan.in_rounds ? plan.pairs * plan.subs : plan.lists_at_once * plan.units * plan.parts;
  const std::int64_t rows = parts * plan.rows;
  params.partial = arrays.take<__half>(rows * plan.head);
  params.scales = arrays.take<float>(rows * (plan.head / 32));
  params.lse = arrays.take<float>(rows);
  return params;
}

Plan plan_of(const SparseProblem& p, bool hopper) {
  const std::int64_t head = std::max(p.D, p.Dv) <= 64 ? 64 : 128;
  constexpr std::int64_t kFloat = sizeof(float);
  Plan plan{};
  static_cast<sparse::Cut&>(plan) =
      sparse::cut_of(p, {.row_bytes = head * static_cast<std::int64_t>(sizeof(__half)) + (head / 32 + 1) * kFloat,
                         .bytes = kPartialBytes,
                         .item_rows = kItemRows,
                         .item_pairs = std::max<std::int64_t>(1, kItemPositions / p.lists.query_rows)});
  plan.way = way_of(p, plan, hopper);
  plan.in_rounds = plan.way == Way::by_keys && p.lists.by_offsets;
  if (plan.way == Way::together) {
    plan.parts = 1;
    plan.row_tiles = 1;
    plan.lists_at_once = plan.lists;
    plan.tiles_together = sparse::tiles_of_rows(p, kListsTogether * p.lists.query_rows);
  } else if (plan.way == Way::by_rows) {
    plan.share = plan.rows <= kGroupRows ? kSharingWarps : 1;
    plan.row_tiles = plan.share > 1 ? 1 : static_cast<int>(ceil_div(plan.rows, kRowTile));
    plan.lists_at_once = plan.lists;
    if (p.lists.by_offsets) plan.pairs = plan.item_limit = 0;  // there is no index
    // As many CTAs as there are multiprocessors, each with some tiles of keys.
    const std::int64_t ctas = std::max<std::int64_t>(1, plan.lists * plan.units * plan.row_tiles),
                       tiles = ceil_div(p.lists.typical * p.lists.block_size, kTileKeys);
    const std::int64_t parts = current_device().multiprocessors / ctas;
    plan.parts = p.batch_invariant ? 1
                                   : static_cast<int>(std::clamp<std::int64_t>(
                                         parts, 1, std::max<std::int64_t>(1, ceil_div(tiles, plan.share))));
  } else {
    plan.parts = plan.in_rounds ? 0 : static_cast<int>(p.lists.entries) * plan.subs;
  }
  Arrays arrays(nullptr);
  const Params params = params_of(p, plan, arrays);
  if (plan.in_rounds) sparse::csr_of(plan, params, arrays);
  plan.bytes = arrays.bytes();
  return plan;
}

Refusal refuse(const SparseProblem& p, const Plan& plan) {
  if (Refusal reason = sparse::refuse(p, plan); !reason.empty()) return reason;
  // A sequence may be longer than a packed call says.
  const std::int64_t blocks = ceil_div(p.cu_seqlens_k ? p.k_rows : p.Sk, p.lists.block_size);
  if (plan.way == Way::by_rows && p.lists.by_offsets && blocks > kMostBlocksByRows) {
    return text("lists by offsets of ", plan.rows, " rows each name no more than ", kMostBlocksByRows,
                " blocks of keys, not ", blocks);
  }
  return "";
}

std::string description(const SparseProblem& p, const Plan& plan) {
  if (plan.way == Way::together) {
    return text(kListsTogether, " neighbouring lists together, of ", plan.rows,
                " rows each: blocks that any of them names, 64 keys at a time");
  }
  if (plan.way == Way::by_rows) {
    return text("by rows: tiles of ", plan.share > 1 ? kGroupRows : kRowTile, " of the ", plan.rows,
                " that share a list by 64 keys", plan.share > 1 ? text(", ", plan.share, " warps to a tile") : "",
                plan.parts > 1 ? text(", a list's keys in ", plan.parts, " parts") : "");
  }
  const std::string at_a_time = plan.in_rounds ? text("lists of up to ", plan.pairs, " entries")
                                               : text(plan.lists_at_once, " of ", plan.lists, " lists");
  return text("by blocks of ", p.lists.block_size, " keys, ", plan.tile_keys,
              " at a time: rows that name one in tiles of 128, ", at_a_time, " at a time, partial results of ",
              plan.rows, " rows in float16 joined in the order of slots");
}

double moved_bytes(const SparseProblem& p, const Plan& plan) {
  const double entries = static_cast<double>(p.lists.typical), lists = static_cast<double>(plan.lists * plan.units);
  if (plan.way == Way::by_rows) {
    return lists * plan.row_tiles * entries * 2.0 * static_cast<double>(p.lists.block_size * (p.D + p.Dv));
  }
  return lists * static_cast<double>(plan.rows) * entries * (2.0 * static_cast<double>(p.D) + 4.0 * plan.head);
}

}  // namespace heddle::cuda::sparse_fwd
