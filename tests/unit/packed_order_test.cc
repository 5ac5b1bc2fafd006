// Which order a layer's weights have, and why none serves it.
#include <gtest/gtest.h>

#include "heddle/linear.h"

namespace heddle {
namespace {

using lowbit::format_named;

struct Case {
  const char* format;
  std::int64_t rows, columns;
  PackedUse use;
  const char* order;  // or how the refusal begins
};

constexpr PackedUse kGpu{.device = Device::cuda};
constexpr PackedUse kGated{.device = Device::cuda, .gated = true};
constexpr PackedUse kInt8{.device = Device::cuda, .int8_x = true};
constexpr PackedUse kFp8{.device = Device::cuda, .fp8_x = true};

const Case kServed[] = {
    {"nvfp4", 10, 64, {}, "rows16"},
    {"nf4", 64, 64, {}, "rows16"},
    {"int4_g64", 64, 64, {.int8_x = true}, "rows16"},
    {"mxfp4", 64, 64, {.fp8_x = true}, "rows16"},
    {"nvfp4", 24, 64, kGpu, "fragments16"},
    {"nvfp4", 10, 64, kGpu, "matrix"},
    {"e2m1_row", 24, 60, kGpu, "matrix"},
    {"nvfp4", 24, 64, kGated, "matrix"},
    {"nvfp4", 32, 64, kGated, "fragments16"},
    {"int8_row", 32, 64, kInt8, "matrix"},
    {"nvfp4", 32, 64, kFp8, "fragments8"},
    {"mxfp4", 32, 64, kFp8, "fragments8"},
    {"e2m1_row", 32, 64, kFp8, "fragments8"},
    {"fp8_row", 32, 64, kFp8, "matrix8"},
};

TEST(PackedOrder, FollowsFormatShapeAndUse) {
  for (const Case& c : kServed) {
    const PackedOrder found = packed_order_for(format_named(c.format), c.rows, c.columns, c.use);
    EXPECT_EQ(found.refusal, "");
    EXPECT_STREQ(name_of(found.order), c.order) << c.format << " [" << c.rows << ", " << c.columns << "]";
    EXPECT_NO_THROW(packed_storage(format_named(c.format), c.rows, c.columns, c.use.gated, found.order));
  }
}

TEST(PackedOrder, SaysWhyNoneServes) {
  const Case refused[] = {
      {"int8_row", 8, 8, {.int8_x = true, .fp8_x = true}, "int8_x and fp8_x are set: x is rounded one way"},
      {"nf4", 8, 64, {.int8_x = true}, "int8_x is set and the format is nf4: it is for nvfp4, mxfp4, e2m1_row, int4"},
      {"fp8_row", 8, 8, kInt8, "int8_x is set and the format is fp8_row: it is for"},
      {"int8_row", 8, 8, {.fp8_x = true}, "fp8_x is set and the format is int8_row: it is for nvfp4, mxfp4, e2m1_row"},
      {"fp4_bnb", 8, 64, kFp8, "fp8_x is set and the format is fp4_bnb: it is for"},
      {"nvfp4", 8, 64, kInt8, "int8_x is set and the weights are nvfp4, on a GPU: there it is for int8_row, and fp8_x"},
  };
  for (const Case& c : refused) {
    const PackedOrder found = packed_order_for(format_named(c.format), c.rows, c.columns, c.use);
    EXPECT_EQ(found.refusal.rfind(c.order, 0), 0U) << found.refusal;
  }
}

}  // namespace
}  // namespace heddle
