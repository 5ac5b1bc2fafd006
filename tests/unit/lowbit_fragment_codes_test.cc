// Codes of int4, nf4, fp4_bnb, int8 and e4m3 in fragment order, read back as the kernels read them, bit trick by bit
// trick, in bfloat16 and in float16, against the plain dequantisation.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "core/dtypes.h"
#include "heddle/error.h"
#include "kit/linear_layer.h"
#include "lowbit/formats.h"
#include "lowbit/fragments.h"

namespace heddle::lowbit {
namespace {

// A matrix in plain storage, of random codes, scales and zero points.
struct Random {
  Matrix m;
  std::vector<std::uint8_t> codes, zeros;
  std::vector<float> wide;
  std::vector<std::uint16_t> halves;

  Random(const char* format, std::int64_t rows, std::int64_t columns, unsigned seed) {
    std::mt19937 generator(seed);
    m.format = format_named(format);
    m.N = rows, m.K = columns;
    m.group = m.format.group != 0 ? m.format.group : columns;
    m.groups = columns / m.group;
    m.row_bytes = bits_of(m.format.element) == 8 ? columns : (columns + 1) / 2;
    codes.resize(static_cast<std::size_t>(rows * m.row_bytes));
    for (auto& x : codes) {
      do x = static_cast<std::uint8_t>(generator());
      while ((m.format.element == Element::e4m3 && (x & 0x7f) == 0x7f) ||
             (m.format.element == Element::int8 && x == 0x80));
    }
    std::uniform_real_distribution<float> scale(-2.0f, 2.0f);
    for (std::int64_t i = 0; i < rows * m.groups; ++i) {
      wide.push_back(scale(generator));
      halves.push_back(f32_to_f16(wide.back()));
      zeros.push_back(static_cast<std::uint8_t>(generator() % (kMostZero + 1)));
    }
    m.codes = codes.data();
    m.scales = m.format.scale == ScaleType::f32 ? static_cast<void*>(wide.data()) : halves.data();
    m.zeros = m.format.zero_points ? zeros.data() : nullptr;
  }

  double weight(std::int64_t n, std::int64_t k) const {
    if (n >= m.N || k >= m.K) return 0;
    const auto group = static_cast<std::size_t>(n * m.groups + k / m.group);
    const bool pairs = bits_of(m.format.element) == 4;
    std::uint8_t code = codes[static_cast<std::size_t>(n * m.row_bytes + (pairs ? k / 2 : k))];
    if (pairs) code = k % 2 == 0 ? NibblePair{code}.low() : NibblePair{code}.high();
    const float zero = m.zeros != nullptr ? static_cast<float>(zeros[group]) : kInt4Zero;
    return static_cast<double>(value_of(m.format.element, code, zero)) *
           load_scale(m.scales, m.format.scale, static_cast<std::int64_t>(group));
  }
};

struct Bf16 {
  static constexpr float kOnes = 128, kSecond = 128, kOfSecond = 1;  // what codes of int4 are added to
  static constexpr std::uint32_t kBase = 0x4300, kFirstMask = 0xF, kSecondMask = 0xF;
  static std::uint32_t shifted(std::uint32_t half, int i) { return half >> 4 * i; }
  static float value(std::uint32_t bits) { return bf16_to_f32(static_cast<std::uint16_t>(bits)); }
  static bool holds(float x) { return bf16_to_f32(f32_to_bf16(x)) == x; }
  static float int8(std::uint32_t byte) {
    const std::uint32_t x = 0x4300 | byte;
    return value(x & 0xFF7F) + value((x & 0xFF80) ^ 0x8080);
  }
  static float e4m3(std::uint32_t byte) {
    const std::uint32_t x = byte << 8;
    return value((x & 0x8000) | (x >> 4 & 0x07F0)) * std::ldexp(1.0f, 120);
  }
};

struct F16 {
  static constexpr float kOnes = 1024, kSecond = 64, kOfSecond = 1.0f / 16;
  static constexpr std::uint32_t kBase = 0x6400, kFirstMask = 0xF, kSecondMask = 0xF0;
  static std::uint32_t shifted(std::uint32_t half, int i) { return i < 2 ? half : half >> 8; }
  static float value(std::uint32_t bits) { return f16_to_f32(static_cast<std::uint16_t>(bits)); }
  static bool holds(float x) { return f16_to_f32(f32_to_f16(x)) == x; }
  static float int8(std::uint32_t byte) { return value(0x6400 | byte) - 1152; }
  static float e4m3(std::uint32_t byte) {
    const std::uint32_t x = byte << 8;
    return value((x & 0x8000) | (x >> 1 & 0x3F80)) * 256;
  }
};

class Packed {
 public:
  Packed(const Matrix& matrix, bool gated)
      : m(matrix),
        layout(fragment_layout(m.format, WeightOrder::fragments16, m.N, m.K)),
        block(block_layout(m.format)) {
    memory.assign(static_cast<std::size_t>(layout.bytes), std::byte{0xA5});
    scales = reinterpret_cast<float*>(memory.data());
    pack_codes(m, gated, memory.data() + layout.blocks, scales, default_executor());
  }

  // What a kernel multiplies with at a place of the rows and a column, its scales included.
  template <class T>
  double weight(std::int64_t place, std::int64_t column) const {
    const std::byte* const at = memory.data() + layout.blocks +
                                (place / kBlockRows * layout.column_blocks + column / block.columns) * block.bytes;
    const auto& words = reinterpret_cast<const FragmentCodes*>(at)->words;
    const int row = static_cast<int>(place % kBlockRows), k = static_cast<int>(column % block.columns);
    const int step = k / 16, of_step = k % 16, half = k % 2;
    const int thread = row / 16 * 32 + row % 8 * 4 + of_step % 8 / 2, i = of_step / 8 * 2 + row % 16 / 8;
    const double row_scale = scales[place];
    if (bits_of(m.format.element) == 8) {
      const std::uint32_t byte = words[step / 2][thread][step % 2 * 2 + i / 2] >> (i % 2 * 16 + half * 8) & 0xFF;
      const float value = m.format.element == Element::int8 ? T::int8(byte) : T::e4m3(byte);
      EXPECT_TRUE(T::holds(value)) << value;
      return value * row_scale;
    }
    const std::uint32_t word = words[step / 4][thread][step % 4];
    const int group = k / (block.columns / block.groups), of_group = group * kBlockRows + row;
    if (m.format.element != Element::int4) {
      const auto table = lookup_values(m.format.element);
      const float value = table[word >> (8 * i + 4 * half) & 0xF];
      if (m.format.element == Element::fp4_bnb) {
        EXPECT_TRUE(T::holds(value)) << value;
      }
      return value * static_cast<double>(load_scale(at + block.scales, ScaleType::f32, of_group)) * row_scale;
    }
    const float zero = block.zeros != 0 ? static_cast<float>(at[block.zeros + of_group]) : kInt4Zero;
    const std::uint32_t codes =
        T::shifted(word >> 16 * half & 0xFFFF, i) & (i % 2 == 0 ? T::kFirstMask : T::kSecondMask);
    const float minus = (i % 2 == 0 ? T::kOnes : T::kSecond) + zero;
    EXPECT_TRUE(T::holds(minus)) << minus;
    const float value = T::value(codes | T::kBase) * (i % 2 == 0 ? 1 : T::kOfSecond) - minus;
    EXPECT_TRUE(T::holds(value)) << value;
    return value * static_cast<double>(load_scale(at + block.scales, ScaleType::f16, of_group)) * row_scale;
  }

  const Matrix& m;
  const FragmentLayout layout;
  const BlockLayout block;

 private:
  std::vector<std::byte> memory;
  float* scales;
};

void expect_weights(const Random& random) {
  const Matrix& m = random.m;
  SCOPED_TRACE(testing::Message() << name_of(m.format) << " " << m.N << " x " << m.K);
  for (const bool gated : {false, true}) {
    const Packed packed(m, gated);
    for (std::int64_t place = 0; place < packed.layout.row_blocks * kBlockRows; ++place) {
      for (std::int64_t k = 0; k < packed.layout.column_blocks * packed.block.columns; ++k) {
        const double expected = random.weight(row_at(place, gated), k), bound = 2e-7 * std::abs(expected);
        ASSERT_NEAR(packed.weight<Bf16>(place, k), expected, bound) << place << ", " << k;
        ASSERT_NEAR(packed.weight<F16>(place, k), expected, bound) << place << ", " << k;
      }
    }
  }
}

constexpr const char* kFormats[] = {"int4_g32",     "int4_g64",    "int4_g128",    "int4_g32_zp", "int4_g64_zp",
                                    "int4_g128_zp", "nf4",         "nf4_b32",      "nf4_b128",    "nf4_b256",
                                    "fp4_bnb",      "fp4_bnb_b32", "fp4_bnb_b512", "int8_row",    "fp8_row"};

TEST(FragmentCodes, AreTheWeights) {
  for (const char* format : kFormats) {
    const std::int64_t group = format_named(format).group;
    expect_weights(Random(format, 64, std::max<std::int64_t>(group, 128), 1));
    expect_weights(Random(format, 150, group == 0 ? 331 : 3 * group, 2));
  }
}

TEST(FragmentCodes, AreTheWeightsOfAnyShape) {
  std::mt19937 generator(7);
  for (unsigned i = 0; i < 40; ++i) {
    const char* format = kFormats[generator() % std::size(kFormats)];
    const std::int64_t group = format_named(format).group, rows = 1 + generator() % 130;
    const std::int64_t columns = group == 0 ? 1 + generator() % 300 : group * (1 + generator() % (1 + 300 / group));
    expect_weights(Random(format, rows, columns, i));
  }
}

TEST(FragmentCodes, ZeroPointsThatKernelsDoNotHoldAreRefused) {
  for (const int zero : {kMostZero, kMostZero + 1}) {
    kit::QuantizedMemory memory(format_named("int4_g32_zp"), 3, 64);
    const std::vector<float> weights(3 * 64, 0.5f);
    quantize(TensorView(weights.data(), DType::f32, {3, 64}), {}, memory.matrix());
    static_cast<std::uint8_t*>(memory.matrix().zeros.data)[5] = static_cast<std::uint8_t>(zero);
    if (zero <= kMostZero) {
      kit::PackedMemory(memory.matrix(), false, WeightOrder::fragments16);
      continue;
    }
    try {
      kit::PackedMemory(memory.matrix(), false, WeightOrder::fragments16);
      ADD_FAILURE() << "was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("matrix.zeros[2, 1] is 128: order fragments16 has zero points to 127"),
                std::string::npos)
          << error.what();
    }
  }
}

// Bits a weight of large matrices, of which a row's scale is next to nothing.
TEST(FragmentCodes, TakeTheBitsOfTheFormat) {
  const struct {
    const char* format;
    double bits;
  } kExpected[] = {{"nvfp4", 4.5},     {"mxfp4", 4.5},        {"e2m1_row", 4.5},
                   {"nf4", 4.5},       {"nf4_b128", 4.25},    {"nf4_b4096", 4.25},
                   {"fp4_bnb", 4.5},   {"int4_g128", 4.125},  {"int4_g128_zp", 4.1875},
                   {"int4_g64", 4.25}, {"int4_g32_zp", 4.75}, {"int8_row", 8},
                   {"fp8_row", 8}};
  for (const auto& [format, bits] : kExpected) {
    constexpr std::int64_t kExtent = 8192;
    const PackedWeights packed =
        packed_storage(format_named(format), kExtent, kExtent, false, WeightOrder::fragments16);
    const double found = 8.0 * static_cast<double>(packed.data.shape[0] - 4 * kExtent) / (kExtent * kExtent);
    EXPECT_EQ(found, bits) << format;
  }
  EXPECT_THROW(packed_storage(format_named("nf4"), 64, 64, false, WeightOrder::fragments8), Error);
}

TEST(FragmentCodes, ExplainNamesTheCandidate) {
  PackedWeights weights = packed_storage(format_named("int4_g64"), 64, 128, false, WeightOrder::fragments16);
  weights.device = weights.data.device = Device::cuda;
  TensorView x(nullptr, DType::bf16, {4, 128});
  x.device = Device::cuda;
  int found = 0;
  for (const Candidate& c : explain_linear(x, weights)) {
    if (c.name == "sm80_linear") {
      ++found;
      EXPECT_EQ(c.method, std::string("linear"));
      EXPECT_TRUE(c.supported || !c.reason.empty());
    }
  }
  EXPECT_EQ(found, 1);
}

}  // namespace
}  // namespace heddle::lowbit
