// What the roles of a CTA are told of the tile of query rows at hand.
#pragma once

namespace heddle::cuda::sm90::attention {

// Announcements that are no tile. kPause: compute and write what is there before waiting for more; nothing is then on
// its way in shared memory.
constexpr int kNoMoreTiles = -1, kPause = -2;

// One tile of work: rows of one head (or group of heads) of one sequence, and the key tiles that they meet.
struct alignas(16) Work {
  int position;               // of the first row in its sequence; or one of the above
  int h, sequence;            // head unit (a head, or a kv head's whole group if packed)
  int q_row, k_row;           // the sequence's first row in packed q and k; 0 if they are not
  int rows, used_rows, keys;  // stored rows, rows and keys in use
  int off;
  int begin, end;              // keys that some row attends are in [begin, end)
  int k_begin, k_end;          // key tiles, k_end > k_begin
  int whole_begin, whole_end;  // key tiles of which every row attends every key
  int careful;                 // computed again: every tile of v passes the guard, no maximum is guessed
  unsigned first_number;       // a CTA counts all its key tiles in the order of their use: that of tile k_end - 1
  int spoiled;                 // set by consumers whose result is not finite: the tile is to come again, careful

  __device__ unsigned number_of(int k_tile) const { return first_number + static_cast<unsigned>(k_end - 1 - k_tile); }
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
