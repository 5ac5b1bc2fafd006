// A call's window as GPU kernels take it is the band that the CPU's kernels and the reference ask.
#include "cuda/common/attention/window.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "cuda/any/row_band.h"

namespace heddle {
namespace {

constexpr std::int64_t kSides[] = {-1, 0, 1, 7, cuda::kOpen - 1, cuda::kOpen, std::int64_t{1} << 40};

TEST(Window, IsTheBandOfTheCall) {
  for (const Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right}) {
    for (const std::int64_t left : kSides) {
      for (const std::int64_t right : kSides) {
        SCOPED_TRACE(testing::Message() << "causal " << static_cast<int>(causal) << ", window " << left << ", "
                                        << right);
        AttentionProblem p{};
        p.causal = causal;
        p.window_left = left;
        p.window_right = right;
        const Band band = p.band({});
        const cuda::Window window = cuda::window_of(p);
        EXPECT_EQ(window.left, std::min<std::int64_t>(band.left, cuda::kOpen));
        EXPECT_EQ(window.right, std::min<std::int64_t>(band.right, cuda::kOpen));
        EXPECT_EQ(cuda::has_band(p), band.left < Band::kOpen || band.right < Band::kOpen);
      }
    }
  }
}

// Also of pieces that stand as far from each other as positions go, and are as long as kernels take them.
TEST(RowBand, IsTheBandOfThePiece) {
  constexpr std::int64_t kLong = cuda::kOpen / 4, kFar = kPositions;
  int rows = 0;
  for (const std::int64_t off :
       {std::int64_t{0}, std::int64_t{-3}, std::int64_t{40}, kLong, -kLong, 3 * kLong, kFar, -kFar}) {
    for (const std::int64_t left : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{9}, kLong}) {
      for (const std::int64_t right : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{25}, kLong}) {
        for (const std::int64_t q_step : {std::int64_t{1}, std::int64_t{7}, kLong / 16}) {
          for (const std::int64_t key_step : {std::int64_t{1}, std::int64_t{3}, std::int64_t{16}, kLong / 100}) {
            AttentionProblem p{};
            p.window_left = left, p.window_right = right, p.q_step = q_step, p.key_step = key_step;
            for (const std::int64_t keys : {std::int64_t{0}, std::int64_t{100}, kLong / key_step}) {
              const Sequence s{.sq = 16, .sk = keys, .off = off};
              const Band band = p.band(s);
              const cuda::RowBand found(p);
              for (int i = 0; i < s.sq; ++i, ++rows) {
                const KeyRange expected = band.keys_of(i);
                const std::int64_t begin = found.begin(cuda::row_band_off(s), i);
                const std::int64_t end = std::min<std::int64_t>(found.end(cuda::row_band_off(s), i), keys);
                const bool same = begin >= end ? expected.empty() : KeyRange{begin, end} == expected;
                ASSERT_TRUE(same) << "off " << off << ", window " << left << ", " << right << ", steps " << q_step
                                  << ", " << key_step << ", " << keys << " keys, row " << i << ": " << begin << " to "
                                  << end << ", not " << expected.begin << " to " << expected.end;
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(rows, 10000);
}

}  // namespace
}  // namespace heddle
