// Any text as a pattern: it is refused with heddle::Error, or its text gives the same pattern again, and its lists say
// of every pair what the pattern says.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "bytes.h"
#include "heddle/error.h"
#include "heddle/patterns.h"

namespace {

using namespace heddle;

// Two bytes of sizes, one of flags and length, then the text. Letters are too many to be found one by one, so bytes
// from 128 on stand for words.
std::string expression(fuzz::Bytes& bytes) {
  static const char* const kWords[] = {"local(",  "strided(",   "dilated(", "sink(", "columns(", "rows(", "diagonals(",
                                       "random(", "size=",      "seed=",    ")",     " | ",      " & ",   "(",
                                       ", ",      "2147483647", "-",        "17",    "64",       "3"};
  std::string out;
  while (!bytes.empty()) {
    const std::uint8_t byte = bytes.next();
    if (byte < 128) {
      out += static_cast<char>(byte);
    } else {
      out += kWords[byte % std::size(kWords)];
    }
  }
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Bytes bytes(data, size);
  const std::int64_t keys = bytes.below(90), flags = bytes.next(), rows = keys - bytes.below(keys + 1);
  const std::int64_t block_sizes[] = {16, 32, 64, 128}, list_rows[] = {1, 7, 16, 64};
  const bool causal = (flags & 1) != 0;
  const PatternOptions options{
      .causal = causal, .block_size = block_sizes[flags >> 1 & 3], .query_rows = list_rows[flags >> 3 & 3]};
  try {
    const Pattern pattern = Pattern::parse(expression(bytes));
    if (Pattern::parse(pattern.text()).text() != pattern.text()) std::abort();
    const PatternLength length{rows, keys};
    const std::int64_t heads = 2, words = (options.block_size + 31) / 32;
    const PatternLists lists = pattern_lists({&pattern, 1}, heads, {&length, 1}, options);
    for (std::int64_t h = 0; h < lists.units; ++h) {
      for (std::int64_t i = 0; i < rows; ++i) {
        const std::int32_t* at = lists.offsets.data() + h * (lists.lists + 1) + i / options.query_rows;
        std::vector<bool> met(static_cast<std::size_t>(keys));
        for (std::int32_t n = at[0]; n < at[1]; ++n) {
          const auto k = static_cast<std::size_t>(n);
          const std::int64_t begin = lists.blocks[k] * options.block_size;
          for (std::int64_t j = 0; j < options.block_size && begin + j < keys; ++j) {
            const std::int64_t row = lists.mask_ids[k] * options.query_rows + i % options.query_rows;
            const bool kept = lists.mask_ids[k] < 0 ||
                              (lists.masks[static_cast<std::size_t>(row * words + j / 32)] >> (j % 32) & 1) != 0;
            if (kept && (!causal || begin + j <= i + keys - rows)) met[static_cast<std::size_t>(begin + j)] = true;
          }
        }
        for (std::int64_t j = 0; j < keys; ++j) {
          if (met[static_cast<std::size_t>(j)] != pattern.keeps(length, causal, h, i, j)) std::abort();
        }
      }
    }
  } catch (const Error&) {
  }
  return 0;
}
