// The tiles that a pattern keeps of a run of rows, found part by part without looking at those that no part names.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "patterns/mask_pool.h"
#include "patterns/node.h"

namespace heddle {

struct PatternTile {
  std::int32_t block;
  MaskId mask;  // not kNoTile
};

// A run of rows of one head, and its keys in blocks.
struct PatternRows {
  PatternLength length;
  bool causal;
  std::int64_t head;
  std::int64_t position;          // of the first row
  std::int64_t rows, block_size;  // of a tile; rows may lead over the sequence's end
  std::int64_t first, last;       // blocks [first, last) are asked for
};

// Answers for one pattern; what it made of masks for one run of rows serves the others.
class PatternTiles {
 public:
  PatternTiles(const PatternNode& node, MaskPool& pool) : node_(node), pool_(pool) {}

  // In ascending order of blocks.
  std::vector<PatternTile> of(const PatternRows& rows) { return tiles(node_, rows); }

 private:
  using Tiles = std::vector<PatternTile>;

  Tiles tiles(const PatternNode& node, PatternRows rows);
  Tiles of_distances(const PatternNode& node, const PatternRows& rows);
  Tiles of_random(const PatternNode& node, const PatternRows& rows);
  // The mask of a part that repeats: of `key` it was made before, or is by make().
  template <class Make>
  MaskId known(const PatternNode& node, std::int64_t key, const Make& make);

  const PatternNode& node_;
  MaskPool& pool_;
  std::map<std::pair<const PatternNode*, std::int64_t>, MaskId> known_;
};

}  // namespace heddle
