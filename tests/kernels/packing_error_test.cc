// What packing says it changed, against the weights that come out of it; and what `exact` refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/check.h"
#include "heddle/linear.h"
#include "kit/linear_layer.h"
#include "kit/lowbit_weights.h"
#include "lowbit/formats.h"
#include "ops/lowbit/arguments.h"
#include "reference/lowbit.h"

namespace heddle {
namespace {

using kit::HostTensor;
using kit::PackedMemory;
using kit::QuantizedMemory;

constexpr WeightOrder kOrders[] = {WeightOrder::rows16, WeightOrder::fragments16, WeightOrder::fragments8,
                                   WeightOrder::matrix, WeightOrder::matrix8};

bool has_order(const std::string& format, WeightOrder order) {
  if (order == WeightOrder::matrix8) return format == "fp8_row";
  return order != WeightOrder::fragments8 || format == "nvfp4" || format == "mxfp4" || format == "e2m1_row";
}

QuantizedMemory quantized(const std::string& name, std::int64_t rows, std::int64_t columns) {
  const lowbit::Format format = lowbit::format_named(name);
  const HostTensor weights = kit::draw_weights(kit::Draw::gaussian, DType::f32, rows, columns, format.element, 5);
  QuantizedMemory memory(format, rows, columns);
  lowbit::quantize(weights.view(), {}, memory.matrix());
  return memory;
}

std::uint8_t* scales_of(const QuantizedMemory& memory) {
  return static_cast<std::uint8_t*>(memory.matrix().scales.data);
}

// Every code, under scales `least` to `least + count - 1`, as stored.
QuantizedMemory spread(const char* name, std::int64_t rows, std::int64_t columns, int least, int count) {
  QuantizedMemory memory(lowbit::format_named(name), rows, columns);
  std::mt19937 random(7);
  const lowbit::QuantizedMatrix& m = memory.matrix();
  for (std::int64_t i = 0; i < m.codes.elements(); ++i) static_cast<std::uint8_t*>(m.codes.data)[i] = random() % 256;
  for (std::int64_t i = 0; i < m.scales.elements(); ++i) scales_of(memory)[i] = least + random() % count;
  if (m.global_scale.given()) *static_cast<float*>(m.global_scale.data) = 0.0123f;
  return memory;
}

// Packs in fragments8, and holds what is said of it to unpack_weights().
PackingError checked_packing(const QuantizedMemory& memory, bool gated) {
  const lowbit::QuantizedMatrix& m = memory.matrix();
  const lowbit::Matrix stored = lowbit::checked_matrix(Check("test"), m, "matrix");
  const PackedMemory packed(packed_storage(m.format, m.rows, m.columns, gated, WeightOrder::fragments8));
  const PackingError error = pack_weights(m, packed.weights());
  const HostTensor out = HostTensor::output(DType::f32, {m.rows, m.columns});
  unpack_weights(packed.weights(), out.view());
  constexpr double kOfFloat32 = 1e-6;
  std::int64_t changed = 0;
  double largest = 0;
  for (std::int64_t i = 0; i < m.rows * m.columns; ++i) {
    const double expected = reference::dequantized(stored, i / m.columns, i % m.columns);
    const double change = expected == 0 ? std::abs(out.get(i)) : std::abs(out.get(i) / expected - 1);
    changed += change > kOfFloat32;
    largest = std::max(largest, change);
    const bool before = i < error.max_row * m.columns + error.max_column;
    EXPECT_FALSE(before && change > error.max - kOfFloat32 && error.changed > 0) << i;
  }
  EXPECT_EQ(error.changed, changed);
  EXPECT_NEAR(error.max, largest, kOfFloat32);
  return error;
}

TEST(PackingError, IsNoneWhereOrdersHoldAllWeights) {
  for (const std::string& name : lowbit::format_names()) {
    for (const WeightOrder order : kOrders) {
      if (!has_order(name, order) || (name == "nvfp4" && order == WeightOrder::fragments8)) continue;
      const QuantizedMemory memory = quantized(name, 70, 256);
      for (const bool gated : {false, true}) {
        const PackedMemory packed(packed_storage(memory.matrix().format, 70, 256, gated, order));
        const PackingError error = pack_weights(memory.matrix(), packed.weights(), {.exact = true});
        EXPECT_EQ(error.changed, 0) << name << " " << name_of(order);
        EXPECT_EQ(error.max, 0.0);
      }
    }
  }
}

TEST(PackingError, CountsRoundedWeightsOfMxfp4) {
  for (const bool gated : {false, true}) {
    const PackingError error = checked_packing(spread("mxfp4", 150, 320, 100, 20), gated);
    EXPECT_GT(error.changed, 0);
    EXPECT_EQ(error.max, 1.0);
    EXPECT_EQ(checked_packing(spread("mxfp4", 150, 320, 100, 12), gated).changed, 0);
  }
}

// A binade below what the order has.
TEST(PackingError, IsOfTheWeightThatChangesMost) {
  QuantizedMemory memory = quantized("mxfp4", 3, 96);
  std::memset(scales_of(memory), 120, 9);
  scales_of(memory)[5] = 120 - 12;
  auto* const codes = static_cast<std::uint8_t*>(memory.matrix().codes.data);
  std::memset(codes, 0x66, 3 * 48);  // 4, which halves exactly
  codes[48 + 40] = 0x36;             // 1.5 in column 81: 0.75 is a tie, to the even code of 1
  const PackingError error = checked_packing(memory, false);
  EXPECT_EQ(error.changed, 1);
  EXPECT_NEAR(error.max, 1.0 / 3, 1e-15);
  EXPECT_EQ(error.max_row, 1);
  EXPECT_EQ(error.max_column, 81);
}

TEST(PackingError, CountsRoundedWeightsOfNvfp4) {
  for (const bool gated : {false, true}) {
    const PackingError near = checked_packing(spread("nvfp4", 150, 320, 56, 30), gated);
    EXPECT_GT(near.changed, 0);
    EXPECT_NEAR(near.max, 1.0 / 21, 1e-15);  // 2.5 for 2.625
    EXPECT_EQ(checked_packing(spread("nvfp4", 150, 320, 0, 127), gated).max, 1.0);
  }
  EXPECT_GT(checked_packing(quantized("nvfp4", 70, 256), false).changed, 0);
  // Scales that are powers of two leave nothing to round.
  QuantizedMemory memory = quantized("nvfp4", 2, 64);
  for (int i = 0; i < 8; ++i) scales_of(memory)[i] = static_cast<std::uint8_t>(56 + 8 * (i % 3));
  EXPECT_EQ(checked_packing(memory, false).changed, 0);
}

// A row's scale that is subnormal has lost bits.
TEST(PackingError, CountsRowsWhoseScaleIsRounded) {
  QuantizedMemory memory = quantized("nvfp4", 1, 64);
  std::memset(scales_of(memory), 16, 4);  // 2^-5, eleven binades below what the row is taken to
  std::memset(memory.matrix().codes.data, 0x77, 32);
  static_cast<std::uint8_t*>(memory.matrix().codes.data)[3] = 0x70;
  *static_cast<float*>(memory.matrix().global_scale.data) = 1.2345678e-38f;
  const PackingError error = checked_packing(memory, false);
  EXPECT_EQ(error.changed, 63);
  EXPECT_GT(error.max, 1e-6);
}

TEST(PackingError, OfNothingIsNone) {
  for (const char* name : {"nvfp4", "mxfp4"}) {
    for (const auto& [rows, columns] : {std::pair{0, 64}, std::pair{5, 0}}) {
      const QuantizedMemory memory(lowbit::format_named(name), rows, columns);
      if (memory.matrix().global_scale.given()) *static_cast<float*>(memory.matrix().global_scale.data) = 1.0f;
      for (const WeightOrder order : {WeightOrder::fragments16, WeightOrder::fragments8}) {
        const PackedMemory packed(packed_storage(memory.matrix().format, rows, columns, false, order));
        EXPECT_EQ(pack_weights(memory.matrix(), packed.weights(), {.exact = true}).changed, 0);
      }
    }
  }
}

std::string refusal(const QuantizedMemory& memory, WeightOrder order) {
  const lowbit::QuantizedMatrix& m = memory.matrix();
  const PackedMemory packed(packed_storage(m.format, m.rows, m.columns, false, order));
  try {
    pack_weights(m, packed.weights(), {.exact = true});
  } catch (const Error& error) {
    EXPECT_TRUE(packed.untouched());
    return error.what();
  }
  return "was accepted";
}

TEST(PackingError, IsRefusedByExactBeforeAnythingIsWritten) {
  QuantizedMemory memory = quantized("mxfp4", 4, 64);
  std::memset(scales_of(memory), 127, 8);
  std::memset(memory.matrix().codes.data, 0x22, 4 * 32);  // 1
  scales_of(memory)[5] = 127 - 30;
  EXPECT_EQ(refusal(memory, WeightOrder::rows16), "was accepted");
  EXPECT_EQ(refusal(memory, WeightOrder::matrix), "was accepted");
  EXPECT_EQ(
      refusal(memory, WeightOrder::fragments16),
      "[pack_weights] matrix[2, 32] is 9.31323e-10: order fragments16 would change it by 1 of itself, and 32 of 256 "
      "weights in all: with exact set it may change none");
  scales_of(memory)[5] = 127 - 29;
  EXPECT_EQ(refusal(memory, WeightOrder::fragments16), "was accepted");
  EXPECT_NE(
      refusal(memory, WeightOrder::fragments8).find("matrix[2, 32] is 1.86265e-09: order fragments8 would change"),
      std::string::npos);
  EXPECT_NE(refusal(quantized("nvfp4", 4, 64), WeightOrder::fragments8).find("with exact set it may change none"),
            std::string::npos);
}

}  // namespace
}  // namespace heddle
