// Patterns of sparse attention: which keys a row attends by where both stand, written as an expression, and the lists
// of key blocks and masks (sparse.h) that say the same.
//
//   pattern   = all { "|" all }                          either: pairs of one or the other
//   all       = one { "&" one }                          both
//   one       = name "(" numbers ")" | "(" pattern ")"
//
// p is a row's position, j a key's, in a sequence of its own:
//   local(n)                       |p - j| <= n: n keys to each side
//   local(left, right)             p - left <= j <= p + right, as AttentionOptions::window_left and right
//   strided(step)                  p - j is a multiple of step
//   dilated(n, step)               the n keys to each side that are step, 2 * step, ... apart, and its own
//   sink(n)                        j < n: the first keys
//   columns(j, ...)                these keys
//   rows(p, ...)                   every key, for these rows
//   diagonals(d, ...)              p - j is one of these
//   random(n, size=64, seed=0)     each block of `size` rows has n of the blocks of `size` keys, or all there are,
//                                  drawn by the head's number, its own and the seed
//
// Numbers are integers of 32 bits. Under causality a row attends what its pattern names and is not after itself, and
// random draws from the blocks up to the row's own.
// Sources: Child et al., arXiv 1904.10509 (strided); Beltagy et al., arXiv 2004.05150 (local, dilated, global rows and
// columns); Zaheer et al., arXiv 2007.14062 (random); Xiao et al., arXiv 2309.17453 (sink); Jiang et al., arXiv
// 2407.02490 (A-shape: sink | local; vertical-slash: columns | diagonals).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace heddle {

struct PatternNode;

// A sequence of rows, which are its last positions: row i stands at i + keys - rows. Not more rows than keys.
struct PatternLength {
  std::int64_t rows = 0, keys = 0;
};

// An expression that was read.
class Pattern {
 public:
  // Throws Error: what is no pattern, with the place and what was expected there.
  static Pattern parse(std::string_view expression);

  // The expression as it is usually written: parsed, it gives the same pattern, and the same text.
  const std::string& text() const { return text_; }
  // Whether heads differ: `random` is in it.
  bool by_head() const;
  // Whether row i of a head attends key j of a sequence.
  bool keeps(PatternLength length, bool causal, std::int64_t head, std::int64_t i, std::int64_t j) const;

  // What it is made of.
  const PatternNode& node() const { return *node_; }

 private:
  explicit Pattern(std::shared_ptr<const PatternNode> node);

  std::shared_ptr<const PatternNode> node_;
  std::string text_;
};

struct PatternOptions {
  bool causal = false;           // the call's, which then applies it inside the blocks: no mask has it
  std::int64_t block_size = 64;  // as BlockLists has them
  std::int64_t query_rows = 64;  // at most 1024
  std::int64_t first_head = 0;   // the number of the first head, by which `random` draws
  bool packed = false;           // sequences lie one behind the other, and lists are numbered as sparse.h has it
};

// Lists of key blocks one behind the other, as BlockLists takes them beside offsets. Blocks ascend in each list, and a
// block that is met nowhere is in none.
struct PatternLists {
  std::int64_t units = 1;              // L: 1 where heads do not differ
  std::int64_t lists = 0;              // N
  std::vector<std::int32_t> offsets;   // [units, lists + 1]
  std::vector<std::int32_t> blocks;    // [entries]
  std::vector<std::int32_t> mask_ids;  // [entries]; -1: the whole block, or all of it that there is
  std::vector<std::int32_t> masks;     // [M, query_rows, ceil(block_size / 32)], each another
  // Over all units. Of causal ones `all` is what causality leaves.
  std::int64_t whole_tiles = 0, partial_tiles = 0, all_tiles = 0;
  std::int64_t pairs = 0, all_pairs = 0;
};

// patterns: one for all heads, or one for each of `heads`. The time is that of the tiles that each part of an
// expression names, not of all there are. Throws Error.
PatternLists pattern_lists(std::span<const Pattern> patterns, std::int64_t heads,
                           std::span<const PatternLength> sequences, const PatternOptions& options);

}  // namespace heddle
