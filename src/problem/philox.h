// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the counter-based generator of
// dropout. Its mask depends on positions alone, so forward, backward and every tiling agree. constexpr, so that GPU
// code may call it too.
#pragma once

#include <array>
#include <cstdint>

#include "heddle/attention.h"

namespace heddle {

constexpr std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter, std::uint32_t key0,
                                                  std::uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key1, static_cast<std::uint32_t>(product0)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The probability p_ij of query head `head` (counted over the whole batch: b * H + h) is kept if its random word is at
// least this.
constexpr std::uint32_t dropout_threshold(float p) {
  return static_cast<std::uint32_t>(static_cast<double>(p) * 4294967296.0);
}

// Random words of keys 4 * j4 .. 4 * j4 + 3 for row i. Rows and keys below 2^32 each, heads below 2^32.
constexpr std::array<std::uint32_t, 4> dropout_words(const Dropout& dropout, std::uint32_t head, std::uint32_t i,
                                                     std::uint32_t j4) {
  const auto offset = static_cast<std::uint32_t>(dropout.offset ^ (dropout.offset >> 32));
  return philox4x32({j4, i, head, offset}, static_cast<std::uint32_t>(dropout.seed),
                    static_cast<std::uint32_t>(dropout.seed >> 32));
}

constexpr bool dropout_keeps(const Dropout& dropout, std::uint32_t head, std::uint32_t i, std::uint32_t j) {
  return dropout_words(dropout, head, i, j / 4)[j % 4] >= dropout_threshold(dropout.p);
}

}  // namespace heddle
