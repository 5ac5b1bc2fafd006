// Where lists of tiles lie, and the launches.
#include <algorithm>
#include <limits>

#include "core/check.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/requirements.h"
#include "cuda/common/tile_lists/host.h"
#include "cuda/common/tile_lists/kernels.cuh"

namespace heddle::cuda::tile_lists {
namespace {

using sparse::ceil_div;

Params params_of(const SparseProblem& p, const RowTiles& tiles) {
  Params params{};
  params.problem = p;
  params.lists = sparse::tiles_of_rows(p, p.lists.query_rows);
  params.tiles_of_list = static_cast<int>(p.lists.query_rows / tiles.rows);
  params.rows_of_tile = static_cast<int>(tiles.rows);
  params.keys_of_tile = kKeysOfTile;
  params.part_bits = kPartBits;
  params.key_tiles = p.cu_seqlens_k ? p.k_rows / kKeysOfTile + p.B + 1 : p.B * ceil_div(p.Sk, kKeysOfTile);
  return params;
}

std::int64_t entries_of(const SparseProblem& p, const Params& params) {
  return params.lists * p.lists.units * p.lists.entries;
}

Grid a_warp_each(std::int64_t lists) { return {sparse::blocks_of(lists, kWarps), kThreads}; }

}  // namespace

TileLists keys_of_rows(const SparseProblem& p, const RowTiles& tiles, std::int64_t keys, sparse::Arrays& arrays,
                       std::string_view operation, cudaStream_t stream) {
  Params params = params_of(p, tiles);
  const std::int64_t units = p.lists.units, numbers = params.lists * units;
  params.blocks_of_tile = static_cast<int>(keys / p.lists.block_size);
  params.tiles_of_rows = arrays.take<std::int32_t>(entries_of(p, params));
  params.counts_of_rows = arrays.take<std::int32_t>(numbers);
  if (params.counts_of_rows != nullptr) start(operation, keys_of_rows_kernel, a_warp_each(numbers), stream, params);
  return {.tiles = params.tiles_of_rows,
          .counts = params.counts_of_rows,
          .begins = nullptr,
          .length = p.lists.entries,
          .stride_s = ceil_div(p.Sq, p.lists.query_rows) * units,
          .stride_h = 1,
          .stride_t = units,
          .heads_of_list = static_cast<int>(tiles.heads / units),
          .tiles_of_list = params.tiles_of_list,
          .rows_of_list = p.cu_seqlens_q ? static_cast<int>(p.lists.query_rows) : 0};
}

TileLists rows_of_keys(const SparseProblem& p, const RowTiles& tiles, bool in_turns, sparse::Arrays& arrays,
                       std::string_view operation, cudaStream_t stream) {
  Params params = params_of(p, tiles);
  const std::int64_t numbers = params.numbers(), entries = entries_of(p, params),
                     written = entries * params.tiles_of_list;
  if (in_turns) {
    const TileLists by_rows = keys_of_rows(p, tiles, kKeysOfTile, arrays, operation, stream);
    params.tiles_of_rows = const_cast<std::int32_t*>(by_rows.tiles);
    params.counts_of_rows = const_cast<std::int32_t*>(by_rows.counts);
    params.places = arrays.take<std::int32_t>(written);
  }
  params.counts = arrays.take<std::int32_t>(numbers);
  params.begins = arrays.take<std::int32_t>(numbers);
  params.ends = arrays.take<std::int32_t>(numbers);
  params.named = arrays.take<std::int32_t>(entries);
  params.entries = arrays.take<std::int32_t>(written);
  if (params.counts != nullptr && numbers > 0) {
    check(cudaMemsetAsync(params.counts, 0, static_cast<std::size_t>(numbers) * sizeof(std::int32_t), stream),
          operation);
    const Grid by_lists = a_warp_each(params.lists * p.lists.units);
    start(operation, count_kernel, by_lists, stream, params);
    start(operation, scan_kernel, {1, kScanThreads}, stream, params);
    start(operation, fill_kernel, by_lists, stream, params);
    start(operation, rows_of_keys_kernel, a_warp_each(numbers), stream, params);
    if (in_turns) start(operation, places_kernel, a_warp_each(numbers), stream, params);
  }
  return {.tiles = params.entries,
          .counts = params.counts,
          .begins = params.begins,
          .length = 0,
          .stride_s = ceil_div(p.Sk, kKeysOfTile),
          .stride_h = params.key_tiles,
          .stride_t = 1,
          .heads_of_list = static_cast<int>(tiles.heads / p.lists.units),
          .tiles_of_list = 1,
          .rows_of_list = p.cu_seqlens_k ? kKeysOfTile : 0,
          .places = params.places};
}

bool fits(const SparseProblem& p, const RowTiles& tiles) {
  const Params params = params_of(p, tiles);
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  return entries_of(p, params) <= kMost / std::max(params.tiles_of_list, 1) && params.numbers() <= kMost &&
         params.lists * p.lists.units <= kMost;
}

Refusal refuse(const SparseProblem& p) {
  if (Refusal reason = refuse_other_than_hopper(); !reason.empty()) return reason;
  if (p.dtype != DType::f16 && p.dtype != DType::bf16) {
    return text("it takes float16 and bfloat16, not ", name_of(p.dtype));
  }
  if (p.k.dtype != p.dtype) return text("it does not read ", name_of(p.k.dtype), " beside q of ", name_of(p.dtype));
  if (std::max(p.D, p.Dv) > 128 || p.D % 8 != 0 || p.Dv % 8 != 0) {
    return text("its head sizes are multiples of 8 to 128, not ", p.D, " and ", p.Dv);
  }
  if (p.lists.block_size != 64 && p.lists.block_size != 128) {
    return text("its blocks have 64 or 128 keys, not ", p.lists.block_size);
  }
  if (p.lists.by_offsets) return "its lists are of one length, not given by offsets";
  if (p.lists.masked) return "its lists are of whole blocks, without masks";
  if (p.softcap != 0 || p.alibi || p.bias || p.mask) return "it has no softcap, ALiBi, bias or mask";
  if (p.dropout.p > 0) return "it has no dropout";
  if (!(p.scale > 0)) return text("scale must be positive; found ", p.scale);
  if (p.page_table || p.cache_batch_idx || p.cache_leftpad || p.int4) return "it has no cached keys";
  if (p.append) return "it does not append keys";
  if (p.piece() || p.stepped()) return "it has no q_offset, key_offset and q_step";
  if (p.float32_out) return text("it does not write o in float32 beside q of ", name_of(p.dtype));
  return "";
}

}  // namespace heddle::cuda::tile_lists
