// Which views share memory, where an output must share none with what is read.
#include "core/overlap.h"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

namespace heddle {
namespace {

TEST(MayShareMemory, IsExactForSlicesOfOneTensor) {
  std::vector<float> data(4 * 3 * 2 * 8);
  const auto slice = [&](std::int64_t part, std::int64_t width) {
    return TensorView(data.data() + part, DType::f32, {4, 2, width}, {48, 8, 1});
  };
  EXPECT_FALSE(may_share_memory(slice(0, 8), slice(16, 8)));
  EXPECT_FALSE(may_share_memory(slice(0, 3), slice(3, 5)));
  EXPECT_TRUE(may_share_memory(slice(0, 4), slice(3, 5)));
  EXPECT_TRUE(may_share_memory(slice(3, 5), slice(0, 4)));
  EXPECT_TRUE(may_share_memory(slice(0, 1), slice(48, 1)));
  EXPECT_FALSE(may_share_memory(slice(0, 1), TensorView(data.data() + 1, DType::f32, {4, 2, 0})));
  const TensorView reversed(data.data() + 7, DType::f32, {8}, {-1});
  EXPECT_TRUE(may_share_memory(reversed, TensorView(data.data(), DType::f32, {1})));
  EXPECT_FALSE(may_share_memory(reversed, TensorView(data.data() + 8, DType::f32, {1})));
}

}  // namespace
}  // namespace heddle
