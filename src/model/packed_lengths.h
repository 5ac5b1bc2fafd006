// What attention on the CPU needs at most for packed sequences of any lengths within bounds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace heddle {

// The larger of bytes(cu_seqlens) for `total` >= 1 rows in `sequences` sequences of at most `longest`, the longest
// first, which decides for the full score matrix, and for the longest beside so many of one row that no worker is idle:
// flash attention cuts its tiles smaller, and needs less, where one would be.
template <class Bytes>
std::size_t most_attention_bytes(std::int64_t total, std::int64_t sequences, std::int64_t longest, int workers,
                                 const Bytes& bytes) {
  longest = std::min(longest, total);
  std::vector<std::int32_t> cu_seqlens(static_cast<std::size_t>(sequences) + 1, 0);
  for (std::int64_t i = 1; i <= sequences; ++i) {
    cu_seqlens[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(std::min(i * longest, total));
  }
  const std::size_t longest_first = bytes(cu_seqlens);
  const std::int64_t wanted = std::max(sequences, 4 * std::int64_t{workers});
  const auto beside = static_cast<std::size_t>(std::min(wanted, INT32_MAX - longest));
  cu_seqlens.assign(beside + 2, 0);
  for (std::size_t i = 0; i <= beside; ++i) {
    cu_seqlens[i + 1] = static_cast<std::int32_t>(longest + static_cast<std::int64_t>(i));
  }
  return std::max(longest_first, bytes(cu_seqlens));
}

}  // namespace heddle
