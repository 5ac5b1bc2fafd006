// Known-answer vectors of Random123 (kat_vectors, philox4x32, 10 rounds) and the dropout mask made from it.
#include "problem/philox.h"

#include <cmath>

#include <gtest/gtest.h>

namespace heddle {
namespace {

using Words = std::array<std::uint32_t, 4>;

TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, 0, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, 0xffffffff, 0xffffffff),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Dropout, MaskComesFromCounterAndKey) {
  const Dropout dropout{0.25f, 0x299f31d0a4093822u, 0};
  EXPECT_EQ(dropout_words(dropout, 5, 7, 9), philox4x32({9, 7, 5, 0}, 0xa4093822, 0x299f31d0));
  for (std::uint32_t j = 0; j < 8; ++j) {
    EXPECT_EQ(dropout_keeps(dropout, 5, 7, j), dropout_words(dropout, 5, 7, j / 4)[j % 4] >= 0x40000000u) << j;
  }
  const Dropout later{0.25f, 0x299f31d0a4093822u, std::uint64_t{3} << 32 | 1};
  EXPECT_EQ(dropout_words(later, 5, 7, 9), philox4x32({9, 7, 5, 2}, 0xa4093822, 0x299f31d0));
}

TEST(Dropout, DropsItsShare) {
  for (float p : {0.1f, 0.5f, 0.9f}) {
    const Dropout dropout{p, 1, 2};
    int dropped = 0;
    constexpr int kRows = 200, kKeys = 200;
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kKeys; ++j) dropped += !dropout_keeps(dropout, 3, i, j);
    }
    const double n = kRows * kKeys, deviation = std::sqrt(n * p * (1 - p));
    EXPECT_NEAR(dropped, n * p, 4 * deviation) << p;
  }
}

}  // namespace
}  // namespace heddle
