// Values that no row of a tile attends: P is zero there, but zero times NaN is not, so they are cleared before they are
// multiplied.
#pragma once

#include "cuda/sm90/attention/params.h"
#include "cuda/sm90/attention/work.cuh"

namespace heddle::cuda::sm90::attention {

// Rows of a tile of v that some row may attend by its band: [begin, end), in the tile.
template <class C>
struct AttendedRows {
  int begin, end;
  __device__ AttendedRows(const TileWork<typename C::Walk>& w, int tile)
      : begin(max(w.walk.keys().begin - tile * C::kTileK, 0)),
        end(max(min(w.walk.keys().end - tile * C::kTileK, C::kTileK), 0)) {}
};

// Whether a tile of v goes through the guard on its way to the consumers: if the tile of query rows is careful, or if
// some of its keys lie outside of the walk's. Those behind the tensor's last row need none: the copy fills them with
// zeros.
template <class C>
__device__ inline bool passes_guard(const Params& p, const TileWork<typename C::Walk>& w, int tile) {
  if (C::kRemovesPairs && w.careful) return true;
  const AttendedRows<C> rows(w, tile);
  const bool zeros_follow = w.k_row + w.walk.keys().end >= p.k_rows;
  return rows.begin > 0 || (rows.end < C::kTileK && !zeros_follow);
}

}  // namespace heddle::cuda::sm90::attention
