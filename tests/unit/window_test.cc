// A call's window as GPU kernels take it is the band that the CPU's kernels and the reference ask.
#include "cuda/common/attention/window.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

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

}  // namespace
}  // namespace heddle
