// Patterns as lists of key blocks.
#include <algorithm>
#include <limits>

#include "core/check.h"
#include "heddle/patterns.h"
#include "patterns/tiles.h"

namespace heddle {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max(), kMostRows = 1024;

std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }

void check_arguments(std::span<const Pattern> patterns, std::int64_t heads, std::span<const PatternLength> sequences,
                     const PatternOptions& options) {
  const Check check("patterns");
  const std::int64_t size = options.block_size, rows = options.query_rows;
  check.require(size == 16 || size == 32 || size == 64 || size == 128, "block_size is ", size,
                ": it must be 16, 32, 64 or 128");
  check.require(rows >= 1 && rows <= kMostRows, "query_rows is ", rows, ": it must be from 1 to ", kMostRows);
  check.require(heads >= 1 && heads <= kMost, "heads is ", heads, ": it must be from 1 to ", kMost);
  check.require(options.first_head >= 0 && options.first_head <= kMost - heads, "first_head is ", options.first_head,
                ": heads are numbered from 0 to ", kMost);
  const auto given = static_cast<std::int64_t>(patterns.size());
  check.require(given == 1 || given == heads, "there are ", given, " patterns and ", heads,
                " heads: there must be one pattern for all, or one for each");
  check.require(options.packed || sequences.size() == 1, "there are ", sequences.size(),
                " sequences that are not packed: they have the same lists, so there must be one");
  std::int64_t all = 0;
  for (const PatternLength& s : sequences) {
    check.require(s.rows >= 0 && s.keys <= kMost, "a sequence has ", s.rows, " rows and ", s.keys,
                  " keys: they must be from 0 to ", kMost);
    check.require(s.rows <= s.keys, "a sequence has ", s.rows, " rows and ", s.keys,
                  " keys: rows are its last positions, so there must be no more of them");
    all += s.rows;
  }
  check.require(all <= kMost, "sequences have ", all, " rows together: at most ", kMost, " can be packed");
}

// What lists are made into.
class Lists {
 public:
  Lists(const PatternOptions& options, std::int64_t units, std::int64_t lists)
      : options_(options), pool_(options.query_rows, options.block_size) {
    out.units = units;
    out.lists = lists;
    out.offsets.reserve(static_cast<std::size_t>(units * (lists + 1)));
  }

  // Lists [number, number + ceil(rows / query_rows)) of one head; those before it that nobody has are empty.
  void add(PatternTiles& tiles, std::int64_t head, const PatternLength& length, std::int64_t number) {
    while (here_ < number) close();
    const std::int64_t size = options_.block_size, step = options_.query_rows, blocks = ceil_div(length.keys, size);
    for (std::int64_t i = 0; i < length.rows; i += step) {
      const std::int64_t p = i + length.keys - length.rows, rows = std::min(step, length.rows - i);
      const std::int64_t last = options_.causal ? std::min(blocks, (p + rows - 1) / size + 1) : blocks;
      for (const PatternTile& tile : tiles.of({.length = length,
                                     .causal = options_.causal,
                                     .head = head,
                                     .position = p,
                                     .rows = step,
                                     .block_size = size,
                                     .first = 0,
                                     .last = last})) {
        add(tile, p, rows, length);
      }
      out.all_tiles += last;
      for (std::int64_t r = 0; r < rows; ++r) out.all_pairs += options_.causal ? p + r + 1 : length.keys;
      close();
    }
  }
  void end_unit() {
    while (here_ < out.lists) close();
    out.offsets.push_back(static_cast<std::int32_t>(out.blocks.size()));
    here_ = 0;
  }

  MaskPool& pool() { return pool_; }

  PatternLists out;

 private:
  void close() {
    // Where this list began.
    out.offsets.push_back(static_cast<std::int32_t>(begin_));
    begin_ = out.blocks.size();
    ++here_;
  }

  void add(const PatternTile& tile, std::int64_t p, std::int64_t rows, const PatternLength& length) {
    // Pairs that there are: at the sequence's end and at the diagonal not all of a tile's.
    const std::int64_t keys = std::min(length.keys - tile.block * options_.block_size, options_.block_size);
    const std::int64_t apart = p - tile.block * options_.block_size;
    const MaskId there = existing(rows, keys, apart), met = pool_.both(tile.mask, there);
    if (met == kNoTile) return;
    const bool whole = met == there;
    if (out.blocks.size() == static_cast<std::size_t>(kMost)) {
      throw Error(text("[patterns] the lists have more than ", kMost, " entries together"));
    }
    out.blocks.push_back(tile.block);
    out.mask_ids.push_back(whole ? -1 : number_of(tile.mask));
    out.pairs += pool_.pairs(met);
    (whole ? out.whole_tiles : out.partial_tiles) += 1;
  }

  MaskId existing(std::int64_t rows, std::int64_t keys, std::int64_t apart) {
    const bool cut = options_.causal && apart < options_.block_size - 1;  // the last key is after the first row
    if (!cut && rows == options_.query_rows && keys == options_.block_size) return kWholeTile;
    return pool_.make([&](auto r, auto j) { return r < rows && j < keys && (!cut || j <= apart + r); });
  }

  // Masks are numbered as they are used: the pool has others beside them.
  std::int32_t number_of(MaskId id) {
    numbers_.resize(pool_.size(), -1);
    std::int32_t& number = numbers_[static_cast<std::size_t>(id)];
    if (number < 0) {
      number = next_++;
      for (const std::uint32_t word : pool_.words(id)) out.masks.push_back(static_cast<std::int32_t>(word));
    }
    return number;
  }

  const PatternOptions& options_;
  MaskPool pool_;
  std::vector<std::int32_t> numbers_;
  std::int32_t next_ = 0;
  std::int64_t here_ = 0;
  std::size_t begin_ = 0;
};

}  // namespace

PatternLists pattern_lists(std::span<const Pattern> patterns, std::int64_t heads,
                           std::span<const PatternLength> sequences, const PatternOptions& options) {
  check_arguments(patterns, heads, sequences, options);
  const std::int64_t rows_of_list = options.query_rows;
  std::int64_t total = 0;
  for (const PatternLength& s : sequences) total += s.rows;
  const std::int64_t lists = !options.packed     ? ceil_div(total, rows_of_list)
                             : rows_of_list == 1 ? total
                                                 : total / rows_of_list + static_cast<std::int64_t>(sequences.size());
  const bool one = patterns.size() == 1 && !patterns[0].by_head();
  Lists made(options, one ? 1 : heads, lists);
  std::vector<PatternTiles> tiles;
  for (const Pattern& pattern : patterns) tiles.emplace_back(pattern.node(), made.pool());
  for (std::int64_t unit = 0; unit < made.out.units; ++unit) {
    std::int64_t row = 0, b = 0;
    for (const PatternLength& s : sequences) {
      const std::int64_t number = !options.packed || rows_of_list == 1 ? row : row / rows_of_list + b;
      made.add(tiles[patterns.size() == 1 ? 0 : static_cast<std::size_t>(unit)], options.first_head + unit, s, number);
      row += s.rows;
      ++b;
    }
    made.end_unit();
  }
  return std::move(made.out);
}

}  // namespace heddle
