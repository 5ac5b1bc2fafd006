// What the choice of blocks is told. Made on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem/select_blocks.h"

namespace heddle::cuda::sm80::select_blocks {

constexpr int kThreads = 128, kWarp = 32, kWarps = kThreads / kWarp;
constexpr int kRows = 16 * kWarps;  // of a CTA: positions times heads of the group
constexpr int kTileKeys = 64;       // pooled keys at a time
constexpr int kPitch = kTileKeys + 4;
constexpr int kMostSlots = 128;

struct Params {
  SelectProblem problem;
  int positions;       // of a CTA: kRows / G
  int position_tiles;  // of the longest sequence
  int wide, narrow;    // strides of pooled keys in a block of the lists, and in a pooled key
  float scale_log2;
};

// What a position sees and lists anyway.
struct Position {
  int seen, touched;  // pooled keys, and blocks that these touch: the first ones
  int forced[3], taken;
};

// Dynamic shared memory: tiles of keys, probabilities of a tile, their sums over the group (of this tile and the one
// before), and each position's best blocks so far.
struct Layout {
  std::size_t probabilities, sums, best, at, bytes;
};
constexpr Layout layout(std::size_t head, std::size_t positions, std::size_t slots) {
  Layout at{};
  at.probabilities = 2 * kTileKeys * head * 2;
  at.sums = at.probabilities + kRows * kPitch * sizeof(float);
  at.best = at.sums + positions * 2 * kTileKeys * sizeof(float);
  at.at = at.best + positions * slots * 2 * sizeof(int);
  at.bytes = at.at + positions * sizeof(Position);
  return at;
}

}  // namespace heddle::cuda::sm80::select_blocks
