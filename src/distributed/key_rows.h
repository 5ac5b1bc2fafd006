// Rows that ranks send each other, by the way they go, and which of them receivers' first pieces have.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "heddle/distributed.h"

namespace heddle::distributed {

inline double number(std::int64_t x) { return static_cast<double>(x); }

// Rows or bytes, by the way they go: inside of a rank's host, and to other hosts or from them.
struct Traffic {
  double inside = 0, across = 0;

  double all() const { return inside + across; }
  Traffic operator*(double factor) const { return {inside * factor, across * factor}; }
  Traffic operator+(const Traffic& other) const { return {inside + other.inside, across + other.across}; }
  Traffic operator-(const Traffic& other) const { return {inside - other.inside, across - other.across}; }
  // As a rank needs as long as the slower way, the most of all ranks may be of several.
  void take_most(const Traffic& other) {
    inside = std::max(inside, other.inside);
    across = std::max(across, other.across);
  }
};

// Adds what goes between two ranks.
void add(Traffic& traffic, const Problem& p, int a, int b, double amount);

// Of a rank's first piece the keys, as they lie in its buffer, and the pairs; and whether each row is in one piece.
struct FirstPiece {
  std::int64_t key_begin = 0, key_end = 0;
  double pairs = 0;
  bool whole = true;
};

// Of `gather` and `needed`.
std::vector<FirstPiece> first_pieces(const Plan& plan, Scheme scheme);

// Rows of keys, and of gradients of keys, that a rank sends, and that it gets, where keys go to rows.
struct KeyRows {
  Traffic keys, gradients, keys_got, gradients_got;
  Traffic first, first_got;  // of the keys: what is sent for receivers' first pieces
  bool in_place = true;      // all that it gets: it need not wait for the rest to put keys in their places
};

// pieces: of each rank, or none, where it is not asked what goes first.
std::vector<KeyRows> key_rows(const Plan& plan, Scheme scheme, std::span<const FirstPiece> pieces = {});

}  // namespace heddle::distributed
