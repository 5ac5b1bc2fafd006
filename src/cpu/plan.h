// How a problem is cut for the CPU: row tiles, key blocks, key chunks. The arithmetic of a row depends on (D, Dv,
// dtype, options, its own keys) only; threads, batch and tile sizes move work between workers without changing a bit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "problem/attention.h"

namespace heddle::cpu {

constexpr std::int64_t kKeyBlock = 128;  // keys between two rescalings of a row's sum
constexpr std::int64_t kKeyChunk = 512;  // keys of one partial result where keys are split
constexpr std::int64_t kSplitRows = 64;  // a kv head with at most this many query rows splits its keys
constexpr std::int64_t kTileFloats =
    98304;  // of Q and O in a tile of query rows: with K, V and P they fit a 1 MB cache
constexpr std::int64_t kBackwardFloats = 122880;  // of Q and dO, each in two layouts, and dQ in a backward tile
constexpr std::int64_t kBiasRows = 48;            // positions of one bias gradient task

constexpr std::int64_t round_up(std::int64_t x, std::int64_t to) { return (x + to - 1) / to * to; }
constexpr std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }

// Query rows of a tile, which share one packed block of keys: the more, the less packing. A multiple of 48, so of every
// register tile's rows.
inline std::int64_t tile_rows(const AttentionProblem& p) {
  return std::clamp<std::int64_t>(kTileFloats / (round_up(p.D, 8) + round_up(p.Dv, 8)) / 48 * 48, 48, 1536);
}

// The same, backward; a multiple of 96, so of two register tiles' rows.
inline std::int64_t backward_rows(const AttentionProblem& p) {
  return std::clamp<std::int64_t>(kBackwardFloats / (3 * round_up(p.D, 8) + 2 * round_up(p.Dv, 8)) / 96 * 96, 96, 768);
}

// Tiles of keys that a task is held to, `count` ascending indices of them in the sequence; null: all that its rows
// meet. A tile has Kernels::key_tile() keys.
struct TileList {
  const std::int32_t* tiles = nullptr;
  std::int64_t count = 0;

  explicit operator bool() const { return tiles != nullptr; }
};

// The query rows of one kv head are numbered i * G + g, so that a group's heads share their keys and causal limits
// never decrease along a tile.
struct ForwardTask {
  std::int64_t b = 0, kv_head = 0;
  std::int64_t kv_heads = 1;                // more than one only where few_heads() says so
  std::int64_t row_begin = 0, row_end = 0;  // in [0, sq * G)
  std::int64_t key_begin = 0, key_end = 0;  // of the sequence; more than one chunk only if `partial` is null
  TileList tiles;
  float* partial = nullptr;              // where keys are split: the partial result of this chunk
  std::int64_t partial_head_stride = 0;  // f32 between the partial results of two heads
};

// Positions [row_begin, row_end) of one kv head against the blocks that their lists name.
struct SparseTask {
  std::int64_t b = 0, kv_head = 0;
  std::int64_t row_begin = 0, row_end = 0;
};

// The unfused method: rows [row_begin, row_end) of one kv head and all its keys. scores[key][row] with rows of all the
// kv head's q_rows * G query rows.
struct BaselineTask {
  std::int64_t b = 0, kv_head = 0;
  std::int64_t row_begin = 0, row_end = 0;
  float* scores = nullptr;
};

// Backward: tiles of query rows `first_tile`, `first_tile + tile_step`, ... of one kv head against all its keys. dk and
// dv: the f32 sums of this task, [k_rows][D padded] and [k_rows][Dv padded] (see Kernels::gradient_width). A bias task
// instead walks rows [row_begin, row_end) of each (b, h) that shares one [i, j] plane of the bias.
struct BackwardTask {
  std::int64_t b = 0, kv_head = 0;
  std::int64_t first_tile = 0, tile_step = 1;
  float *dk = nullptr, *dv = nullptr;
  TileList tiles;
};

struct BiasTask {
  std::int64_t bias_b = 0, bias_h = 0;      // element of the bias's batch and head extents
  std::int64_t row_begin = 0, row_end = 0;  // positions i
};

// The positions i of rows [begin, end) of a kv head.
inline Interval<std::int64_t> positions_of(const AttentionProblem& p, Interval<std::int64_t> rows) {
  return {rows.begin / p.G, ceil_div(rows.end, p.G)};
}

// Query rows (those used) that split their keys use chunks for their arithmetic even when one worker walks all of them.
inline bool splits_keys(const AttentionProblem& p, const Sequence& s) {
  return s.sq * p.G <= kSplitRows && s.sk > kKeyChunk;
}

}  // namespace heddle::cpu
