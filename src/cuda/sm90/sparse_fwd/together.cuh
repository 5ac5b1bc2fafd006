// Neighbouring lists together: a CTA has the rows of 16 lists, a warp each, and goes through the blocks that any of
// them names, in order, each loaded once. So there is neither an index nor a partial result.
#pragma once

#include "cuda/common/hand_over.cuh"
#include "cuda/common/prefix_sum.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/common/recomputed.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/common/sparse/tile.cuh"
#include "cuda/common/sparse_fwd/by_rows.cuh"
#include "cuda/common/sparse_fwd/online.cuh"
#include "cuda/sm90/sparse_fwd/together.h"

namespace heddle::cuda::sm90::sparse_fwd::together {

using cuda::sparse_fwd::kGroupRows;
using cuda::sparse_fwd::kTileKeys;
using sparse::kAll;
using sparse::kWarp;

// A thread of a warpgroup of its own brings keys and values, and the group's registers go to the others.
constexpr int kWarpgroup = 128, kThreads = kLists * kWarp + kWarpgroup, kRegisters = 112, kProducerRegisters = 24;
constexpr int kRegistersAtStart = 65536 / kThreads / 8 * 8;
static_assert(kLists * kWarp * kRegisters + kWarpgroup * kProducerRegisters <= kThreads * kRegistersAtStart);

template <class T, int kHead>
struct Config {
  using Element = T;
  static constexpr int kHeadSize = kHead;
  static constexpr int kKeys = 32, kBlocks = kKeys / 8;  // multiplied at a time: scores of more have no registers
  static constexpr int kStages = kHead == 64 ? 8 : 5;    // as shared memory has room for
};

// Of a CTA.
struct Work {
  sparse::Index::Place at;  // the first list's
  Band band;
  int unit, kv_head;

  // With a constant step of keys, so that nothing is divided.
  __device__ Band band_of_rows() const {
    Band constant = band;
    constant.key_step = 1;
    return constant;
  }
};

// The blocks that the lists name, while they are found: a bit each, and how many there are before each word.
struct Marks {
  std::uint32_t bits[kMostBlocks / 32];
  int before[kMostBlocks / 32];
};

template <class C>
struct SharedMemory {
  using Keys = sparse::Tile<typename C::Element, kTileKeys, C::kHeadSize>;
  using Rows = sparse::Tile<typename C::Element, kGroupRows, C::kHeadSize>;
  union Stages {
    struct {
      Keys k, v;
    } of[C::kStages];
    Marks marks;  // before the first stage is filled
  } stages;
  Rows q[kLists];
  std::uint32_t named[kMostEntries * kLists];  // of each block: bit l if list l names it; from bit 16 on, which it is
  int count;                                   // of blocks
  ptx::Barrier ready[C::kStages], free[C::kStages];
  Work work;
};

__device__ inline Work work_of(const Params& p) {
  Work w;
  const auto n = static_cast<int>(blockIdx.x);
  w.unit = n / p.tiles;  // a head unit's lists one after the other: its keys stay in the L2 cache
  w.kv_head = w.unit / p.kv_units;
  // The last ones first: with causality they have the most blocks.
  w.at = p.place(p.tiles - 1 - (n - w.unit * p.tiles), kLists * p.problem.lists.query_rows);
  w.band = p.band(w.at.s);
  return w;
}

// The block that a lane's entry of the warp's list names; -1 if it says nothing. Entries may repeat.
__device__ inline int named_block(const Params& p, const Work& w, int list, int lane) {
  sparse::Index::Place at = w.at;
  at.row += list * p.problem.lists.query_rows;
  at.there = at.row < at.s.q_rows;
  if (!at.there) return -1;
  const auto named = p.problem.lists.list(p.problem, at.b, at.s, at.row, w.unit);
  if (lane >= static_cast<int>(named.size())) return -1;
  const int block = named[lane];
  return p.meets(w.band_of_rows().keys_of({at.row, at.row + p.problem.lists.query_rows}), block) ? block : -1;
}

// Numbers the marked blocks. One warp.
template <class C>
__device__ inline void number_blocks(int words, int lane, SharedMemory<C>& shared) {
  Marks& marks = shared.stages.marks;
  int count = 0;
#pragma unroll 1
  for (int base = 0; base < words; base += kWarp) {
    const int word = base + lane;
    std::uint32_t bits = word < words ? marks.bits[word] : 0;
    const int through = sum_through_lane(__popc(bits), lane);
    int n = count + through - __popc(bits);
    if (word < words) marks.before[word] = n;
    for (; bits != 0; bits &= bits - 1)
      shared.named[n++] = static_cast<std::uint32_t>(32 * word + __ffs(bits) - 1) << 16;
    count += __shfl_sync(kAll, through, kWarp - 1);
  }
  if (lane == 0) shared.count = count;
}

// A warp's rows of q; zeros for those that are not there.
template <class C>
__device__ inline void load_q(const Params& p, const Work& w, int first, int lane, typename SharedMemory<C>::Rows& to) {
  using Rows = typename SharedMemory<C>::Rows;
  constexpr int kPass = kWarp / Rows::kChunks;
  const int chunk = lane % Rows::kChunks;
  const bool column = chunk * Rows::kPerChunk < p.problem.D;
#pragma unroll 4
  for (int row = lane / Rows::kChunks; row < kGroupRows; row += kPass) {
    const int of_list = p.by_group.quotient(row);
    const std::int64_t i = w.at.row + first + of_list;
    const bool exists = column && row < p.rows && i < w.at.s.sq;
    const std::byte* const from =
        exists ? p.problem.q.at(w.at.b, w.at.s.q_begin + i, w.unit * p.group + (row - of_list * p.group)) + 16 * chunk
               : p.problem.q.data;
    ptx::copy_async_16(ptx::shared_address(&to) + Rows::offset(row, chunk), from, exists);
  }
}

template <class C>
__device__ inline void produce(const Params& p, SharedMemory<C>& shared) {
  using Keys = typename SharedMemory<C>::Keys;
  constexpr int kPanels = Keys::kChunks / Keys::kPanelChunks, kPanelColumns = Keys::kPanelChunks * Keys::kPerChunk;
  const Work& w = shared.work;
  const int batch = p.problem.cu_seqlens_k.given ? 0 : static_cast<int>(w.at.b), count = shared.count * p.subs;
  RingPosition<C::kStages> stage;
#pragma unroll 1
  for (int n = 0; n < count; ++n, stage.next()) {
    const int key = p.first_key(shared.named, n) + static_cast<int>(w.at.s.k_begin);
    auto& to = shared.stages.of[stage.index];
    auto& ready = shared.ready[stage.index];
    await_free(shared.free[stage.index], stage.phase);
    ptx::barrier_arrive_expect(ready, 2 * sizeof(Keys));
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      ptx::tma_load_4d(to.k.panel[panel], p.k, ready, panel * kPanelColumns, key, w.kv_head, batch,
                       ptx::L2::evict_normal);
    }
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      ptx::tma_load_4d(to.v.panel[panel], p.v, ready, panel * kPanelColumns, key, w.kv_head, batch,
                       ptx::L2::evict_normal);
    }
  }
}

// A warp's rows: O and the softmax's statistics over the keys so far.
template <class C>
struct Rows {
  using T = typename C::Element;
  using Keys = typename SharedMemory<C>::Keys;
  using Queries = typename SharedMemory<C>::Rows;
  float o[C::kHeadSize / 8][4] = {};
  RowState state;
  Interval<int> met[2];  // keys that the lane's rows meet

  // first: the list's first row in the sequence.
  __device__ Rows(const Params& p, const Band& band, std::int64_t first) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = static_cast<int>(threadIdx.x) % kWarp / 4 + 8 * r;
      // One that is not there may meet what another does: it is not written.
      const KeyRange keys = band.keys_of(first + (row < p.rows ? p.by_group.quotient(row) : 0));
      met[r] = {static_cast<int>(keys.begin), static_cast<int>(keys.end)};
    }
  }

  // The keys of a tile, the first of which is first_key, from row `from` on.
  __device__ __forceinline__ void meet(const Params& p, int first_key, unsigned from, const Queries& q, const Keys& k,
                                       const Keys& v) {
    const unsigned lane = threadIdx.x % kWarp;
    float s[1][C::kBlocks][4] = {};
    const std::uint32_t q_at = ptx::shared_address(&q) + Queries::offset(lane % 16, lane / 16),
                        k_at = ptx::shared_address(&k) + Keys::offset(from + lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < C::kHeadSize / 16; ++step) {
      std::uint32_t x[4];
      ptx::load_matrix_x4(x, (q_at ^ step % 4 << 5) + step / 4 * Queries::kPanelBytes);
#pragma unroll
      for (int n = 0; n < C::kBlocks / 2; ++n) {
        std::uint32_t y[4];
        ptx::load_matrix_x4(y, (k_at ^ step % 4 << 5) + step / 4 * Keys::kPanelBytes + n * 16 * Keys::kRowBytes);
        ptx::mma_16816<T>(s[0][2 * n], x, y[0], y[1]);
        ptx::mma_16816<T>(s[0][2 * n + 1], x, y[2], y[3]);
      }
    }
    const float scale = cuda::sparse_fwd::positive_scale(s, p.scale_log2);
    first_key += static_cast<int>(from);
    const Interval<int> keys{first_key, first_key + C::kKeys};
    const bool whole = __all_sync(kAll, met[0].holds(keys) && met[1].holds(keys));
    std::uint32_t attended = 0;
    if (!whole) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        keep_keys<C::kBlocks>(met[r].begin - first_key, static_cast<unsigned>(met[r].size()),
                              static_cast<int>(2 * (lane % 4)), [&](int n) { return &s[0][n][2 * r]; });
      }
      attended = attended_keys(s);
    }
    std::uint32_t weights[C::kBlocks / 2][4];
    cuda::sparse_fwd::weigh<T>(s, scale, state, o, weights);
    if (whole) {
      cuda::sparse_fwd::add_values<T, true>(o, weights, attended, v, from);
    } else {
      cuda::sparse_fwd::add_values<T, false>(o, weights, attended, v, from);
    }
  }
};

template <class C>
__global__ void __launch_bounds__(kThreads, 1) together_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  Marks& marks = shared.stages.marks;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  if (thread == 0) {
    shared.work = work_of(p);
    for (int n = 0; n < C::kStages; ++n) {
      ptx::barrier_init(shared.ready[n], 1);
      ptx::barrier_init(shared.free[n], kLists);
    }
    ptx::fence_barrier_init();
  }
  for (int n = thread; n < kMostBlocks / 32; n += kThreads) marks.bits[n] = 0;
  __syncthreads();
  const Work& w = shared.work;
  if (!w.at.there) return;
  const int first = warp * static_cast<int>(p.problem.lists.query_rows);  // of the CTA's rows
  int block = -1;
  if (warp < kLists) {
    block = named_block(p, w, warp, lane);
    if (block >= 0) atomicOr(&marks.bits[block / 32], 1u << block % 32);
    load_q<C>(p, w, first, lane, shared.q[warp]);
    ptx::copy_async_commit();
  }
  __syncthreads();
  if (warp == kLists) number_blocks(static_cast<int>(p.words(w.at.s)), lane, shared);
  __syncthreads();
  if (block >= 0) {
    const int n = marks.before[block / 32] + __popc(marks.bits[block / 32] & ((1u << block % 32) - 1));
    atomicOr(&shared.named[n], 1u << warp);
  }
  finish_reads();  // of the marks, whose place the first keys take
  __syncthreads();
  if (warp >= kLists) {
    ptx::registers_decrease<kProducerRegisters>();
    if (warp == kLists && lane == 0) produce<C>(p, shared);
    return;
  }
  ptx::registers_increase<kRegisters>();
  Rows<C> rows(p, w.band_of_rows(), w.at.row + first);
  ptx::copy_async_wait<0>();
  __syncwarp();  // q is there
  const int count = shared.count * p.subs;
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    // Found anew in each step: a position that is kept has no register.
    const int stage = n % C::kStages;
    // Waited for by those that do not name it, too: so none is more than a round behind or before the others.
    await_filled(shared.ready[stage], static_cast<std::uint32_t>(n / C::kStages & 1));
    const int list = recomputed(thread) / kWarp;
    if ((p.named(shared.named, n) >> list & 1) != 0) {
      const auto& tile = shared.stages.of[stage];
#pragma unroll 1
      for (unsigned from = 0; from < kTileKeys; from += C::kKeys) {
        rows.meet(p, p.first_key(shared.named, n), from, shared.q[list], tile.k, tile.v);
      }
      finish_reads();
      __syncwarp();
    }
    release_after_products(shared.free[stage]);  // which has finished its reads above, if it had any
  }
  const cuda::sparse_fwd::by_rows::Work mine = [&] {
    cuda::sparse_fwd::by_rows::Work mine{};
    mine.at = w.at;
    mine.at.row += recomputed(thread) / kWarp * static_cast<int>(p.problem.lists.query_rows);
    mine.unit = w.unit;
    mine.rows = p.rows;
    return mine;
  }();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const cuda::sparse_fwd::by_rows::Destination<C> to(p, mine, lane / 4 + 8 * r, rows.state.max[r],
                                                       sum_of_quad(rows.state.sum[r]));
#pragma unroll
    for (int m = 0; m < C::kHeadSize / 32; ++m) {
      float o[8];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        o[2 * t] = rows.o[4 * m + t][2 * r];
        o[2 * t + 1] = rows.o[4 * m + t][2 * r + 1];
      }
      to.write(4 * m + lane % 4, o);
    }
    if (lane % 4 == 0) to.write_statistics();
  }
}

}  // namespace heddle::cuda::sm90::sparse_fwd::together
