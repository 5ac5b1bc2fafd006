// What the roles of a CTA are told of the tile of query rows at hand.
#pragma once

#include "problem/key_walk.h"

namespace heddle::cuda::sm90::attention {

// Announcements that are no tile. kPause: compute and write what is there before waiting for more; nothing is then on
// its way in shared memory.
constexpr int kNoMoreTiles = -1, kPause = -2;

// One tile of work: rows of one head (or group of heads) of one sequence.
struct Work {
  int position;               // of the first row in its sequence; or one of the above
  int h, sequence;            // head unit (a head, or a kv head's whole group if packed)
  int q_row, k_row;           // the sequence's first row in packed q and k; 0 if they are not
  int rows, used_rows, keys;  // stored rows, rows and keys in use
  int off;
};

// The same with the tiles of keys that the rows go through, from the last step to the first: at least one, in a pause
// none.
template <class Walk>
struct alignas(16) TileWork : Work {
  Walk walk;
  int careful;            // computed again: every tile of v passes the guard, no maximum is guessed
  unsigned first_number;  // a CTA counts all steps in the order in which it takes them: that of the walk's last
  int spoiled;            // set by consumers whose result is not finite: the tile is to come again, careful

  __device__ unsigned number_of(int step) const {
    return first_number + static_cast<unsigned>(walk.steps().end - 1 - step);
  }
};

// Where among packed sequences the scheduler is. It begins behind a section that has none.
struct alignas(16) PackedPlace {
  int first_head, heads;  // of the section
  int begin, end;         // its sequences
  int first_tile;         // the number of its first tile
  int q_tile, chunk;      // the row of tiles, and the first of the sequences looked at
  int before;             // tiles a head of this section before them
};

constexpr int kWorkSlots = 4;  // announced tiles that are not yet written out

}  // namespace heddle::cuda::sm90::attention
