// Calls of attention between a rank's rows and a buffer of keys.
#pragma once

#include <vector>

#include "distributed/cuts.h"

namespace heddle::distributed {

// Whether any row attends any key between the ends of what it could meet.
bool any_piece(const std::vector<Area>& areas, const Cuts& rows, const Cuts& keys);

// Whether each of so many rows is in one of the pieces, so that nothing is merged.
bool cover_once(const std::vector<Piece>& pieces, std::int64_t rows);

// The same, but for packed sequences, each of which becomes a piece.
std::vector<Piece> one_sequence_each(const std::vector<Piece>& pieces);

class PieceMaker {
 public:
  // areas outlive this. rows: of the rank.
  PieceMaker(const std::vector<Area>& areas, std::int64_t rows)
      : areas_(areas), covered_(static_cast<std::size_t>(rows)) {}

  // Pieces in the order in which they are to be merged and summed. Those of one maker come one after another.
  std::vector<Piece> pieces(const Cuts& rows, const Cuts& keys);

 private:
  bool cover(const Piece& piece);

  const std::vector<Area>& areas_;
  std::vector<bool> covered_;  // rows that some piece had
};

}  // namespace heddle::distributed
