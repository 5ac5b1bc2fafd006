// Lists one behind the other (CSR). No host knows how long they are, so the device finds which of them have partial
// results in memory together: a round.
#pragma once

#include <cstdint>

#include "problem/sparse.h"

namespace heddle::cuda::sparse {

constexpr int kChunk = 4096;  // of lists, whose lengths are summed by themselves

struct Round {
  std::int64_t first;  // list
  int count;           // of lists; 0 behind the last round
  int pairs;           // for which there is room: each list has some for what it could name at the most
};

struct Csr {
  std::int64_t lists;                         // of the call
  std::int64_t lists_at_once, pairs_at_once;  // of a round, at the most
  std::int64_t longest;                       // what one list can name at the most

  // Of list n's head unit u, number n * units + u: room of those before it in its chunk. Of each chunk: of all before.
  std::int64_t *within_chunk, *before_chunk;
  Round* rounds;  // [2]: the present one, and the next
  int* list_of;   // [pairs]: list of the round, times head units, and head unit
  int* used;      // [lists, units] of the round: pairs that say something, the first ones of the list's room
  int* marks;     // [tiles, numbers]: the number of the list, of all, that was the last to name a block

  constexpr std::int64_t room_before(std::int64_t number) const {
    return before_chunk[number / kChunk] + within_chunk[number];
  }
};

}  // namespace heddle::cuda::sparse
