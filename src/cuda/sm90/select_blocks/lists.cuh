// The best blocks of a warp's positions. A lane has `values()` sums of a tile, all of one position, whose `lanes()`
// neighbours have the others.
#pragma once

#include "cuda/common/recomputed.cuh"
#include "cuda/common/sparse/listing.cuh"
#include "cuda/sm90/select_blocks/memory.cuh"

namespace heddle::cuda::sm90::select_blocks {

using sparse::key_of;
using sparse::merged;
using sparse::score_of;
using sparse::sorted;

// A lane's sums of a tile, the first values() of them: value i is that of column first_column() + column_of(i).
using Sums = float[32];
__device__ __forceinline__ constexpr int column_of(int i) { return i / 2 * 8 + i % 2; }
template <class C>
__device__ __forceinline__ int first_column(int lane) {
  int column = lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < C::kCut.halvings; ++n) column += (lane >> (2 + n) & 1) * (64 >> n);
  return column;
}

template <class C>
class Lists {
 public:
  __device__ Lists(const Params& params, SharedMemory<C>& memory) : p(params), shared(memory) {}

  // Of an item whose positions nothing is known of yet.
  __device__ __forceinline__ void begin(const Work& w) {
    const int lane = lane_of_thread(), here = position(lane / kCut.lanes());
#pragma unroll 1
    for (int n = 0; n < kCut.of_warp(); ++n) shared.kept[position(n)][lane] = 0;
    worst = 0;
    waits = 0;
    beaten = here < w.count && free_slots(w, here) > 0 ? -1.0f : INFINITY;
  }

  // Sums of the tile whose first block is `first`. Most tiles have none that beats the last in its list.
  __device__ __forceinline__ void take(const Work& w, const Sums& x, int first) {
    float most = -1.0f;
    for_values([&](int i) { most = fmaxf(most, x[i]); });
    // Of equal scores the block that is there stays: this one has a higher number.
    if (__any_sync(kAll, most > beaten)) join(w, x, first);
  }

  // Writes the lists.
  __device__ __forceinline__ void finish(const Work& w) {
    settle(w, waits > 0);
    const int slots = static_cast<int>(p.problem.slots), lane = lane_of_thread();
#pragma unroll 1
    for (int n = 0; n < kCut.of_warp(); ++n) {
      const int at = position(n);
      if (at >= w.count) return;
      sparse::write_list(w.positions[at], w.list + at * p.problem.blocks_stride_n, slots, shared.kept[at], lane);
    }
  }

 private:
  static constexpr Cut kCut = C::kCut;

  // Calls use(i) for each value that a lane has.
  template <class Use>
  __device__ __forceinline__ static void for_values(Use use) {
#pragma unroll
    for (int i = 0; i < kCut.values(); ++i) use(i);
  }
  // Of the CTA's, the warp's n-th.
  __device__ __forceinline__ int position(int n) const { return consumer_warp() * kCut.of_warp() + n; }
  __device__ __forceinline__ int free_slots(const Work& w, int at) const {
    return static_cast<int>(p.problem.slots) - w.positions[at].taken;
  }

  // A bit for each value that may be listed, as far as its block is concerned; of more values than there are, too.
  __device__ __forceinline__ unsigned may_be_listed(const sparse::Listing& of, int first) const {
    const int seen = of.touched - first;  // columns
    const int count = seen <= 0 ? 0 : min(32, seen / 8 * 2 + min(seen % 8, 2));
    unsigned may = count == 32 ? kAll : (1u << count) - 1;
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      const int at = of.forced[n] - first;
      if (at >= 0 && at < kTileKeys && (at & 6) == 0) may &= ~(1u << (at / 8 * 2 + at % 8));
    }
    return may;
  }

  // A bit for each value that is better than the worst in the list. NaN is not.
  __device__ __forceinline__ unsigned better(const Sums& x, int first) const {
    unsigned bits = 0;
    for_values([&](int i) {
      if (x[i] >= 0 && key_of(score(x[i]), first + column_of(i)) > worst) bits |= 1u << i;
    });
    return bits;
  }
  __device__ static unsigned score(float x) { return __float_as_uint(x) + 1; }

  // Of the position's candidates: all, and those of the lanes before this one.
  struct Count {
    int all, before;
  };
  __device__ __forceinline__ Count count_of(unsigned bits) const {
    const int lanes = kCut.lanes(), lane = lane_of_thread(), mine = __popc(bits);
    int through = mine;
#pragma unroll
    for (int step = 1; step < kCut.lanes(); step *= 2) {
      const int other = __shfl_up_sync(kAll, through, step, lanes);
      if (lane % lanes >= step) through += other;
    }
    return {__shfl_sync(kAll, through, lanes - 1, lanes), through - mine};
  }

  // Candidates wait; where more would than there is room for, those that do are merged with the list first.
  __device__ __forceinline__ void join(const Work& w, const Sums& x, int first) {
    const int lane = recomputed(lane_of_thread()), here = position(lane / kCut.lanes());
    first += first_column<C>(lane);
    const unsigned may = beaten == INFINITY ? 0 : may_be_listed(w.positions[here], first);
    unsigned bits;
    Count count;
    for (bool raised = false;;) {
      bits = may & better(x, first);
      count = count_of(bits);
      const bool over = waits + count.all > kWarp;
      if (!__any_sync(kAll, over)) break;
      if (__any_sync(kAll, over && waits > 0)) {
        settle(w, over);
      } else if (!raised) {
        raise(w, x, bits, over);
        raised = true;
      } else {
        break;
      }
    }
    // Places of the lane's first and behind the position's last; as many as there is room for at a time.
    int place = waits + count.before, end = waits + count.all;
    for (;;) {
      int at = place;
      for_values([&](int i) {
        if ((bits >> i & 1) == 0) return;
        if (at >= 0 && at < kWarp) shared.waiting[here][at] = key_of(score(x[i]), first + column_of(i));
        ++at;
      });
      if (end > 0) waits = min(end, kWarp);
      if (!__any_sync(kAll, end > kWarp)) break;
      settle(w, end > kWarp);
      place -= kWarp;
      end -= kWarp;
    }
  }

  // Calls use(n, lane) for the warp's n-th position where `wanted`, a lane of which is named. Whole warp.
  template <class Use>
  __device__ __forceinline__ void for_positions(bool wanted, Use use) const {
    const int lanes = kCut.lanes();
    unsigned leaders = __ballot_sync(kAll, wanted && lane_of_thread() % lanes == 0);
#pragma unroll 1
    for (; leaders != 0; leaders &= leaders - 1) {
      const int leader = __ffs(leaders) - 1;
      use(leader / lanes, leader);
    }
  }

  __device__ __forceinline__ void raise_to(Key key) {
    if (key <= worst) return;
    worst = key;
    beaten = __uint_as_float(score_of(key) - 1);
  }

  // What waits is merged with the list where `wanted`.
  __device__ __forceinline__ void settle(const Work& w, bool wanted) {
    const int lane = lane_of_thread();
    __syncwarp();  // what waits is there
    for_positions(wanted, [&](int n, int leader) {
      const int at = position(n), count = __shfl_sync(kAll, waits, leader);
      const auto lane_number = static_cast<unsigned>(lane);
      const Key comes = sorted(lane < count ? shared.waiting[at][lane] : Key{0}, lane_number);
      const Key best = merged(max(shared.kept[at][lane], __shfl_sync(kAll, comes, kWarp - 1 - lane)), lane_number);
      shared.kept[at][lane] = best;
      const Key last = __shfl_sync(kAll, best, free_slots(w, at) - 1);
      if (lane / kCut.lanes() == n) {
        raise_to(last);
        waits = 0;
      }
    });
    __syncwarp();  // what waited has been read
  }

  // Where `wanted`, a tile has more candidates than can wait. Its best of each four are 32 scores; the list's last is
  // no worse than the n-th of these, of n that are free.
  __device__ __forceinline__ void raise(const Work& w, const Sums& x, unsigned bits, bool wanted) {
    unsigned most[8] = {};
    for_values([&](int i) {
      if ((bits >> i & 1) != 0) most[i / 4] = max(most[i / 4], score(x[i]));
    });
    const int lane = lane_of_thread(), warp = consumer_warp(), cells = kCut.values() / 4;
    for_positions(wanted, [&](int n, int) {
      const bool mine = lane / kCut.lanes() == n;
#pragma unroll
      for (int cell = 0; cell < 8; ++cell) {
        if (mine && cell < cells) shared.cells[warp][lane % kCut.lanes() * cells + cell] = most[cell];
      }
      __syncwarp();
      const unsigned all = sorted(shared.cells[warp][lane], static_cast<unsigned>(lane));
      const unsigned least = __shfl_sync(kAll, all, free_slots(w, position(n)) - 1);
      if (mine) raise_to(Key{least} << 32);  // which no block of that score is worse than
      __syncwarp();
    });
  }

  const Params& p;
  SharedMemory<C>& shared;
  // Of the lane's position: the last in its list, or what that will not be worse than; its score, which a candidate
  // must beat; how many wait.
  Key worst;
  float beaten;
  int waits;
};

}  // namespace heddle::cuda::sm90::select_blocks
