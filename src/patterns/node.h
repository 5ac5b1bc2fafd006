// A pattern as a tree (include/heddle/patterns.h).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "heddle/patterns.h"

namespace heddle {

enum class PatternKind : std::uint8_t {
  local,
  strided,
  dilated,
  sink,
  columns,
  rows,
  diagonals,
  random,
  either,
  both,
};

struct PatternNode {
  PatternKind kind;
  std::vector<std::int64_t> numbers;                      // as heddle/patterns.h names them; sets ascend, each once
  std::vector<std::shared_ptr<const PatternNode>> parts;  // of either and both: at least two
};

// Whether a part that says only how far a row and a key are apart keeps those `apart` positions, p - j.
bool keeps_distance(const PatternNode& node, std::int64_t apart);

// The blocks of keys that a block of rows draws, ascending.
std::vector<std::int64_t> drawn_blocks(const PatternNode& random, PatternLength length, bool causal, std::int64_t head,
                                       std::int64_t row_block);

}  // namespace heddle
