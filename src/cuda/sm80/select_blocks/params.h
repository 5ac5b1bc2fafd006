// What the choice of blocks is told. Made on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/common/divisor.h"
#include "cuda/common/sparse/listing.h"
#include "problem/select_blocks.h"

namespace heddle::cuda::sm80::select_blocks {

constexpr int kThreads = 128, kWarp = 32, kWarps = kThreads / kWarp;
constexpr int kRows = 16 * kWarps;  // of a CTA: positions times heads of the group
constexpr int kTileKeys = 64;       // pooled keys at a time
constexpr int kPitch = kTileKeys + 4;
constexpr int kMostSlots = 128;

struct Params {
  SelectProblem problem;
  int positions;       // of a CTA: kRows / G, or one
  int copies;          // of a position: 1, or where a CTA has one, one for each warp
  int pitch;           // rows of a position: G, or where it has copies, a warp's 16
  int position_tiles;  // of the longest sequence
  Divisor by_page;     // of pooled keys in pages: those of a page
  int wide, narrow;    // strides of pooled keys in a block of the lists, and in a pooled key
  float scale_log2;
};

// A position, and how its best blocks stand.
struct Position : sparse::Listing {
  int waiting;     // blocks that have not joined the list yet
  unsigned worst;  // score, as keys have it, of the last in the list; 0 while there is room
};

// Of a position's sums: of a tile, and where pooled keys overlap those of the tile before.
constexpr int sum_columns(int narrow) { return narrow > 1 ? 2 * kTileKeys : kTileKeys; }

// Dynamic shared memory: tiles of keys, probabilities of a tile, their sums over the group, each position's best blocks
// so far, those that wait to join them, and what is known of it.
struct Layout {
  std::size_t probabilities, sums, kept, waiting, at, bytes;
};
constexpr Layout layout(const Params& p, int head) {
  const auto size = [](int count, std::size_t bytes) { return static_cast<std::size_t>(count) * bytes; };
  const int lists = p.positions * p.copies, slots = static_cast<int>(p.problem.slots);
  Layout at{};
  at.probabilities = size(2 * p.copies * kTileKeys * head, 2);
  at.sums = at.probabilities + size(kRows * kPitch, sizeof(float));
  at.kept = at.sums + size(lists * sum_columns(p.narrow), sizeof(float));
  at.waiting = at.kept + size(lists * slots, sizeof(std::uint64_t));
  at.at = at.waiting + size(lists * kWarp, sizeof(std::uint64_t));
  at.bytes = at.at + size(lists, sizeof(Position));
  return at;
}

}  // namespace heddle::cuda::sm80::select_blocks
