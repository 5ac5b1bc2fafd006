// The steps of a CPU task over its keys.
#pragma once

#include "cpu/plan.h"
#include "problem/key_walk.h"

namespace heddle::cpu {

// The tiles that a task's list names or, without one, all that its rows' band meets: told apart at each step, so that
// every kernel is compiled once for both.
class TaskWalk {
 public:
  using Index = std::int64_t;

  // rows: of a kv head; keys: of the sequence, from a tile's first on; size: keys of a tile.
  TaskWalk(const AttentionProblem& p, const Sequence& s, Interval<Index> rows, KeyRange keys, Index size,
           const TileList& list)
      : band_(p.band(s), positions_of(p, rows), keys, size), list_(list.tiles, list.count, band_), listed_(list) {}

  Index count() const { return listed_ ? list_.count() : band_.count(); }
  KeyRange tile(Index n) const { return listed_ ? list_.tile(n) : band_.tile(n); }
  bool whole(Index n) const { return listed_ ? list_.whole(n) : band_.whole(n); }

  // What to fetch during step n: the tile after it, no key after the last.
  KeyRange next(Index n) const { return n + 1 < count() ? tile(n + 1) : KeyRange{}; }

 private:
  BandWalk<Index> band_;
  ListWalk<Index> list_;
  bool listed_;
};
static_assert(KeyWalk<TaskWalk>);

}  // namespace heddle::cpu
