// How a call is cut, where its index lies, and the launches.
#include <algorithm>
#include <limits>

#include "core/check.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/requirements.h"
#include "cuda/common/sparse/csr.cuh"
#include "cuda/common/sparse/host.h"
#include "cuda/common/sparse/index.cuh"

namespace heddle::cuda::sparse {
namespace {

// Counts of tiles are no more than this where tiles may be larger, and tiles of about so many lists are quickest.
constexpr std::int64_t kMostCounts = 1 << 22, kListsOfTile = 8;

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

// Of lists by offsets: a CTA has a chunk, and finds the room of the lists before each, and of all.
__global__ void __launch_bounds__(kIndexThreads)
    measure_kernel(const __grid_constant__ Index p, const __grid_constant__ Csr c) {
  __shared__ std::int64_t sums[kIndexThreads / kWarp];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const std::int64_t first = std::int64_t{blockIdx.x} * kChunk, numbers = c.lists * p.units;
  std::int64_t before = 0;
#pragma unroll 1
  for (std::int64_t number = first + thread; number - thread < first + kChunk; number += kIndexThreads) {
    std::int64_t room = 0;
    if (number < numbers) {
      const std::int64_t list = number / p.units;
      const Index::Place w = p.place(list);
      if (w.there) {
        const auto named = p.problem.lists.list(p.problem, w.b, w.s, w.row, number - list * p.units);
        room = min(static_cast<std::int64_t>(named.size()), c.longest);
      }
    }
    const std::int64_t through = sum_through_lane(room, lane);
    if (lane == kWarp - 1) sums[warp] = through;
    __syncthreads();
    std::int64_t all = 0;
    for (int n = 0; n < kIndexThreads / kWarp; ++n) {
      if (n == warp && number <= numbers) c.within_chunk[number] = before + all + through - room;
      all += sums[n];
    }
    before += all;
    __syncthreads();  // the sums have been read
  }
  if (thread == 0) c.before_chunk[blockIdx.x] = before;
}

// One CTA: room of a chunk becomes that of all chunks before it, and the first round is found.
__global__ void __launch_bounds__(kScanThreads)
    sum_chunks_kernel(const __grid_constant__ Index p, const __grid_constant__ Csr c, std::int64_t chunks) {
  __shared__ std::int64_t sums[kScanThreads / kWarp];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  std::int64_t before = 0;
#pragma unroll 1
  for (std::int64_t chunk = thread; chunk - thread < chunks; chunk += kScanThreads) {
    const std::int64_t room = chunk < chunks ? c.before_chunk[chunk] : 0, through = sum_through_lane(room, lane);
    if (lane == kWarp - 1) sums[warp] = through;
    __syncthreads();
    std::int64_t all = 0;
    for (int n = 0; n < kScanThreads / kWarp; ++n) {
      if (n == warp && chunk < chunks) c.before_chunk[chunk] = before + all + through - room;
      all += sums[n];
    }
    before += all;
    __syncthreads();  // the sums have been read
  }
  if (thread == 0) c.rounds[0] = round_from(p, c, 0);  // behind the barrier: all chunks' sums are there
}

// Pairs that have partial results at a time, and lists that may have them.
void cut_by_lengths(const SparseProblem& p, std::size_t bytes, std::int64_t bytes_of_pair, Cut& cut) {
  const std::int64_t of_sequence = p.cu_seqlens_k ? cut.blocks : ceil_div(p.Sk, p.lists.block_size);
  cut.longest = std::min(p.lists.entries, of_sequence);
  // A list has all of its pairs in one round.
  const std::int64_t of_list = cut.units * cut.longest,
                     all = of_list > 0 && cut.lists > kMost / of_list ? kMost : cut.lists * of_list;
  cut.pairs = std::clamp(static_cast<std::int64_t>(bytes) / bytes_of_pair, of_list, std::max(of_list, all));
  // Lists of half the mean length fill a round.
  const std::int64_t typical = std::max<std::int64_t>(1, cut.units * p.lists.typical);
  cut.lists_at_once =
      std::clamp<std::int64_t>(ceil_div(2 * cut.pairs, typical), 1, std::max<std::int64_t>(cut.lists, 1));
}

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
  cut.pairs_of_item = std::clamp<std::int64_t>(share.item_rows / cut.rows, 1, share.item_pairs);
  const std::int64_t partial_bytes = cut.rows * cut.subs * share.row_bytes;
  if (p.lists.by_offsets) {
    cut_by_lengths(p, share.bytes, partial_bytes + 24, cut);
  } else {
    cut.longest = p.lists.entries;
    const std::int64_t bytes_of_list = cut.units * std::max<std::int64_t>(cut.longest, 1) * (partial_bytes + 20);
    cut.lists_at_once = std::clamp<std::int64_t>(static_cast<std::int64_t>(share.bytes) / bytes_of_list, 1,
                                                 std::max<std::int64_t>(cut.lists, 1));
    cut.pairs = cut.lists_at_once * cut.units * cut.longest;
  }
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
  index.slots = !p.lists.by_offsets ? static_cast<int>(p.lists.entries) : 0;
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

Csr csr_of(const Cut& cut, const Index& index, Arrays& arrays) {
  Csr csr{.lists = cut.lists, .lists_at_once = cut.lists_at_once, .pairs_at_once = cut.pairs, .longest = cut.longest};
  const std::int64_t numbers = cut.lists * cut.units + 1;  // one behind the last list
  csr.within_chunk = arrays.take<std::int64_t>(numbers);
  csr.before_chunk = arrays.take<std::int64_t>(ceil_div(numbers, kChunk));
  csr.rounds = arrays.take<Round>(2);
  csr.list_of = arrays.take<int>(cut.pairs);
  csr.used = arrays.take<int>(cut.lists_at_once * cut.units);
  csr.marks = arrays.take<int>(index.tiles() * index.numbers());
  return csr;
}

void launch_csr(const Index& index, const Csr& csr, std::string_view operation, cudaStream_t stream) {
  const std::size_t counts = static_cast<std::size_t>(index.tiles() * index.numbers()) * sizeof(int);
  check(cudaMemsetAsync(index.tile_counts, 0, counts, stream), operation);
  check(cudaMemsetAsync(csr.marks, 0xFF, counts, stream), operation);  // no list's number
  const std::int64_t chunks = ceil_div(csr.lists * index.units + 1, kChunk);
  start(operation, measure_kernel, {static_cast<unsigned>(chunks), kIndexThreads}, stream, index, csr);
  start(operation, sum_chunks_kernel, {1, kScanThreads}, stream, index, csr, chunks);
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
  if (p.lists.masked) return "its lists are of whole blocks, without masks";
  const bool by_offsets = p.lists.by_offsets;
  if (!by_offsets && p.lists.entries > kMostSlots) {
    return text("lists must have no more than ", kMostSlots, " entries, not ", p.lists.entries,
                "; longer ones are taken one behind the other, by offsets");
  }
  const std::int64_t of_pair = cut.subs * cut.rows;
  if (cut.rows > kMost / kMostSlots || p.Hkv * cut.blocks > kMost / 8 || cut.item_limit > kMost / 2 ||
      (by_offsets ? cut.pairs > kMost / 2 / of_pair || cut.lists * cut.units >= kMost
                  : cut.lists_at_once * cut.units > kMost / 2 / std::max<std::int64_t>(1, p.lists.entries * of_pair))) {
    return text("it counts partial results in 31 bits: lists of ", cut.longest, " entries have ", cut.rows,
                " rows each, and keys ", p.Hkv * cut.blocks, " blocks");
  }
  return "";
}

}  // namespace heddle::cuda::sparse
