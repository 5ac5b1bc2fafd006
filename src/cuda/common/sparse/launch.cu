// How a call is cut, where its index lies, and the launches.
#include <algorithm>
#include <limits>

#include "core/check.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/requirements.h"
#include "cuda/common/sparse/host.h"
#include "cuda/common/sparse/index.cuh"

namespace heddle::cuda::sparse {
namespace {

// Counts of tiles are no more than this where tiles may be larger, and tiles of about so many lists are quickest.
constexpr std::int64_t kMostCounts = 1 << 22, kListsOfTile = 8;

}  // namespace

Cut cut_of(const SparseProblem& p, const Share& share) {
  Cut cut{};
  cut.group = p.lists.units == p.Hkv || p.lists.units == 1 ? p.G : 1;
  cut.units = p.H / cut.group;
  cut.rows = cut.group * p.lists.query_rows;
  const std::int64_t size = p.lists.block_size;
  cut.lists = tiles_of_rows(p, p.lists.query_rows);
  cut.blocks = p.cu_seqlens_k ? p.k_rows / size + p.B + 1 : p.B * ceil_div(p.Sk, size);
  cut.head = std::max(p.D, p.Dv) <= 64 ? 64 : 128;
  cut.subs = static_cast<int>(ceil_div(size, kTileKeys));
  cut.tile_keys = static_cast<int>(std::min<std::int64_t>(size, kTileKeys));
  const std::int64_t slots = p.lists.entries;
  const std::int64_t bytes_of_list =
      cut.units * std::max<std::int64_t>(slots, 1) * (cut.rows * cut.subs * share.row_bytes + 20);
  cut.lists_at_once = std::clamp<std::int64_t>(static_cast<std::int64_t>(share.bytes) / bytes_of_list, 1,
                                               std::max<std::int64_t>(cut.lists, 1));
  cut.pairs_of_item = std::clamp<std::int64_t>(share.item_rows / cut.rows, 1, share.item_pairs);
  cut.pairs = cut.lists_at_once * cut.units * slots;
  const std::int64_t numbers = p.Hkv * cut.blocks;
  // Each block may have one item that is not full.
  cut.item_limit = cut.pairs / cut.pairs_of_item + std::min(cut.pairs, numbers);
  const std::int64_t kv_units = std::max<std::int64_t>(cut.units / std::max<std::int64_t>(p.Hkv, 1), 1);
  cut.lists_of_tile = std::max(ceil_div(kListsOfTile, kv_units), ceil_div(cut.lists_at_once * numbers, kMostCounts));
  return cut;
}

Index index_of(const SparseProblem& p, const Cut& cut, Arrays& arrays, bool pairs) {
  Index index{};
  index.problem = p;
  index.units = static_cast<int>(cut.units);
  index.group = static_cast<int>(cut.group);
  index.kv_units = static_cast<int>(cut.units / std::max<std::int64_t>(p.Hkv, 1));
  index.rows = static_cast<int>(cut.rows);
  index.by_rows = Divisor(static_cast<unsigned>(cut.rows));
  index.by_group = Divisor(static_cast<unsigned>(cut.group));
  index.slots = static_cast<int>(p.lists.entries);
  index.subs = cut.subs;
  index.tile_keys = cut.tile_keys;
  index.pairs_of_item = static_cast<int>(cut.pairs_of_item);
  index.lists_of_tile = static_cast<int>(cut.lists_of_tile);
  index.blocks = cut.blocks;
  index.count = cut.lists_at_once;
  if (!pairs) return index;
  const std::int64_t numbers = index.numbers();
  index.tile_counts = arrays.take<int>(index.tiles() * numbers);
  index.counts = arrays.take<int>(numbers);
  index.begins = arrays.take<int>(numbers);
  index.item_begins = arrays.take<int>(numbers);
  index.items_there = arrays.take<int>(1);
  index.block_of = arrays.take<int>(cut.pairs);
  index.place_of = arrays.take<int>(cut.pairs);
  index.named = arrays.take<Named>(cut.pairs);
  index.items = arrays.take<Item>(cut.item_limit);
  return index;
}

void launch_index(const Index& index, std::string_view operation, cudaStream_t stream) {
  const std::int64_t numbers = index.numbers(), pairs = index.count * index.units * index.slots;
  check(cudaMemsetAsync(index.tile_counts, 0, static_cast<std::size_t>(index.tiles() * numbers) * sizeof(int), stream),
        operation);
  const auto launch = [&](void (*kernel)(Index), std::int64_t threads) {
    start(operation, kernel, {blocks_of(threads, kIndexThreads), kIndexThreads}, stream, index);
  };
  launch(count_kernel, index.tiles() * index.problem.Hkv * kWarp);
  launch(sum_tiles_kernel, numbers);
  start(operation, scan_kernel, {1, kScanThreads}, stream, index);
  launch(order_kernel, pairs);
}

Refusal refuse(const SparseProblem& p, const Cut& cut) {
  if (Refusal reason = refuse_before_ampere(); !reason.empty()) return reason;
  if (p.dtype != DType::f16 && p.dtype != DType::bf16) {
    return text("it takes float16 and bfloat16, not ", name_of(p.dtype));
  }
  if (p.k.dtype != p.dtype) return text("it does not read ", name_of(p.k.dtype), " beside q of ", name_of(p.dtype));
  if (std::max(p.D, p.Dv) > 128 || p.D % 8 != 0 || p.Dv % 8 != 0) {
    return text("its head sizes are multiples of 8 to 128, not ", p.D, " and ", p.Dv);
  }
  for (const auto& [name, x] : {std::pair{"q", &p.q}, {"k", &p.k}, {"v", &p.v}}) {
    if (*x && !has_rows_of_16_bytes(*x)) return text(name, " must have contiguous rows at multiples of 16 bytes");
  }
  if (p.softcap != 0 || p.alibi || p.bias || p.mask) return "it has no softcap, ALiBi, bias or mask";
  if (p.dropout.p > 0) return "it has no dropout";
  if (p.cache_batch_idx || p.cache_leftpad || p.int4) return "it reads no caches but plain ones and pages";
  if (p.page_table && p.page_size % p.lists.block_size != 0) {
    return text("pages must hold whole blocks of ", p.lists.block_size, " keys, not ", p.page_size, " keys");
  }
  for (const auto& [name, x] : {std::pair{"k", &p.k}, {"v", &p.v}}) {
    if (p.page_table && p.k_batches > 1 && x->stride_b != p.page_size * x->stride_s) {
      return text(name, "'s pages must lie one behind the other");
    }
  }
  if (p.append) return "it does not append keys";
  if (p.lists.offsets != nullptr) return "its lists are of one length, not given by offsets";
  if (p.lists.masked) return "its lists are of whole blocks, without masks";
  if (p.lists.entries > kMostSlots) return text("lists must have no more than ", kMostSlots, " entries");
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (cut.rows > kMost / kMostSlots || p.Hkv * cut.blocks > kMost / 8 || cut.item_limit > kMost / 2 ||
      cut.lists_at_once * cut.units > kMost / 2 / std::max<std::int64_t>(1, p.lists.entries * cut.subs * cut.rows)) {
    return text("it counts partial results in 31 bits: lists of ", p.lists.entries, " entries have ", cut.rows,
                " rows each, and keys ", p.Hkv * cut.blocks, " blocks");
  }
  return "";
}

}  // namespace heddle::cuda::sparse
