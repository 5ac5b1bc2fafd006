// Elements, scales and names of the low-bit formats: every code there is, and what lies between them.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <set>

#include "heddle/error.h"
#include "lowbit/formats.h"
#include "lowbit/scale_rules.h"

namespace heddle::lowbit {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float above(float x) { return std::nextafter(x, kInfinity); }
float below(float x) { return std::nextafter(x, -kInfinity); }

// The definition: (-1)^s 2^(e - 1) (1 + m / 2), or m / 2 for e = 0.
float e2m1(int code) {
  const int exponent = code >> 1 & 3, mantissa = code & 1;
  const double magnitude = exponent == 0 ? mantissa / 2.0 : std::ldexp(2 + mantissa, exponent - 2);
  return static_cast<float>(code & 8 ? -magnitude : magnitude);
}

TEST(E2m1, EveryCodeDecodesAndComesBack) {
  for (int code = 0; code < 16; ++code) {
    const E2M1 element{static_cast<std::uint8_t>(code)};
    EXPECT_EQ(element.value(), e2m1(code)) << code;
    EXPECT_EQ(std::signbit(element.value()), code >= 8);
    EXPECT_EQ(E2M1::nearest(element.value()).code, code);
    EXPECT_EQ(E2M1::nearest_ties_down(element.value()).code, code == 8 ? 0 : code);
  }
}

TEST(E2m1, CutsAndTies) {
  for (int code = 0; code < 7; ++code) {
    const float tie = (e2m1(code) + e2m1(code + 1)) / 2;
    const int even = code % 2 == 0 ? code : code + 1;
    for (const int sign : {0, 8}) {
      const float f = sign != 0 ? -1.0f : 1.0f;
      EXPECT_EQ(E2M1::nearest(f * tie).code, even | sign) << code;
      EXPECT_EQ(E2M1::nearest(f * below(tie)).code, code | sign) << code;
      EXPECT_EQ(E2M1::nearest(f * above(tie)).code, (code + 1) | sign) << code;
      EXPECT_EQ(E2M1::nearest_ties_down(f * tie).code, code == 0 ? 0 : code | sign) << code;
      EXPECT_EQ(E2M1::nearest_ties_down(f * above(tie)).code, (code + 1) | sign) << code;
    }
  }
  for (const float large : {5.0001f, 7.0f, 1e30f, kInfinity}) {
    EXPECT_EQ(E2M1::nearest(large).code, 7);
    EXPECT_EQ(E2M1::nearest_ties_down(-large).code, 15);
  }
  EXPECT_EQ(E2M1::nearest(-0.0f).code, 8);
}

TEST(E8m0, PowersOfTwo) {
  for (int bits = 0; bits < 255; ++bits) {
    EXPECT_EQ(E8M0{static_cast<std::uint8_t>(bits)}.value(), std::ldexp(1.0, bits - 127)) << bits;
    EXPECT_EQ(E8M0::power(bits - 127).bits, bits);
  }
  EXPECT_TRUE(std::isnan(E8M0{255}.value()));
  EXPECT_EQ(E8M0::power(-1000).bits, 0);
  EXPECT_EQ(E8M0::power(1000).bits, 254);
}

TEST(Tables, ScalesOfOneByte) {
  for (int bits = 0; bits < 256; ++bits) {
    const auto byte = static_cast<std::uint8_t>(bits);
    const float e4m3 = load_scale(&byte, ScaleType::e4m3, 0), e8m0 = load_scale(&byte, ScaleType::e8m0, 0);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(e4m3), std::bit_cast<std::uint32_t>(f8e4m3_to_f32(byte)));
    EXPECT_EQ(std::bit_cast<std::uint32_t>(e8m0), std::bit_cast<std::uint32_t>(E8M0{byte}.value()));
  }
}

// What kernels on tensor cores rest on: without the global scale nothing is lost in 16 bits.
TEST(Tables, BlockScaledE2m1FitsSixteenBits) {
  for (unsigned code = 0; code < 16; ++code) {
    const float value = E2M1{static_cast<std::uint8_t>(code)}.value();
    for (unsigned bits = 0; bits < 127; ++bits) {
      const float product = value * kE4M3Values[bits];
      EXPECT_EQ(f16_to_f32(f32_to_f16(product)), product);
      EXPECT_EQ(bf16_to_f32(f32_to_bf16(product)), product);
    }
    for (unsigned bits = 2; bits < 252; ++bits) {  // 4 * 2^125 would leave bfloat16's range, as float32's
      const float product = value * kE8M0Values[bits];
      EXPECT_EQ(bf16_to_f32(f32_to_bf16(product)), product);
    }
  }
}

// Nearest by brute force over all codes; of equally near ones the lower magnitude, then the lower value.
template <class Element>
int nearest_code(double x, bool signed_magnitude) {
  int best = -1;
  double least = 0;
  for (int code = 0; code < 16; ++code) {
    const double value = Element{static_cast<std::uint8_t>(code)}.value(), distance = std::abs(x - value);
    if (signed_magnitude && (x < 0) != (code >= 8)) continue;
    const double now = best < 0 ? 0 : Element{static_cast<std::uint8_t>(best)}.value();
    const bool lower = signed_magnitude ? std::abs(value) < std::abs(now) : value < now;
    if (best < 0 || distance < least || (distance == least && lower)) {
      best = code;
      least = distance;
    }
  }
  return best;
}

template <class Element, class Cuts>
void check_table(const Cuts& cuts, bool signed_magnitude) {
  std::set<float> probes = {0.0f, 1.0f, -1.0f, 1.5f, -1.5f};
  for (const float cut : cuts) probes.insert({cut, above(cut), below(cut), above(above(cut)), -cut, -above(cut)});
  for (int i = -2000; i <= 2000; ++i) probes.insert(static_cast<float>(i) / 1777);
  for (const float x : probes) {
    EXPECT_EQ(Element::nearest(x).code, nearest_code<Element>(x, signed_magnitude)) << x;
  }
}

TEST(Nf4, NearestOfTheTable) {
  for (int code = 0; code < 16; ++code) {
    EXPECT_EQ(NF4::nearest(NF4{static_cast<std::uint8_t>(code)}.value()).code, code);
  }
  EXPECT_TRUE(std::ranges::is_sorted(NF4::kValues));
  check_table<NF4>(NF4::kCuts, false);
}

TEST(Fp4Bnb, NearestOfTheTableWhichIsNotE2m1) {
  const float twelfths[] = {0, 0.0625f, 8, 12, 4, 6, 2, 3};
  for (int code = 0; code < 16; ++code) {
    const FP4Bnb element{static_cast<std::uint8_t>(code)};
    EXPECT_FLOAT_EQ(std::abs(element.value()), twelfths[code & 7] / 12) << code;
    EXPECT_EQ(std::signbit(element.value()), code >= 8);
    if (code == 8) continue;  // no x < 0 is 0
    EXPECT_EQ(FP4Bnb::nearest(element.value()).code, code);
  }
  check_table<FP4Bnb>(FP4Bnb::kCuts, true);
}

TEST(Nibbles, HalvesOfAByte) {
  for (unsigned low = 0; low < 16; ++low) {
    for (unsigned high = 0; high < 16; ++high) {
      const NibblePair pair = NibblePair::of(low, high);
      EXPECT_EQ(pair.low(), low);
      EXPECT_EQ(pair.high(), high);
      EXPECT_EQ(pair.byte, low + 16 * high);
    }
  }
}

TEST(Formats, NamesComeBack) {
  for (const std::string& name : format_names()) EXPECT_EQ(name_of(format_named(name)), name);
  for (const char* name : {"nf4_b32", "nf4_b128", "nf4_b4096", "fp4_bnb_b512"}) {
    EXPECT_EQ(name_of(format_named(name)), name);
  }
  EXPECT_EQ(name_of(format_named("nf4_b64")), "nf4");
  EXPECT_EQ(format_named("fp4_bnb_b4096").group, 4096);
  for (const char* name : {"", "fp4", "NVFP4", "nf4_b", "nf4_b16", "nf4_b8192", "nf4_b96", "nf4_b064", "nf4_b64x",
                           "nf4_b-64", "nf4_b99999999999999999999", "int4_g256", "int4", "nvfp4_b32"}) {
    try {
      format_named(name);
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("format is '" + std::string(name) + "': it must be one of nvfp4"),
                std::string::npos)
          << error.what();
    }
  }
  Format odd = format_named("nvfp4");
  odd.group = 32;
  EXPECT_THROW(name_of(odd), Error);
}

TEST(Formats, StorageAndItsBytes) {
  struct Row {
    const char* name;
    double bits;  // per weight, rows of 4096, global scale aside
  };
  for (const Row& row : {Row{"nvfp4", 4.5}, Row{"mxfp4", 4.25}, Row{"e2m1_row", 4 + 32.0 / 4096}, Row{"nf4", 4.5},
                         Row{"nf4_b128", 4.25}, Row{"int4_g128", 4.125}, Row{"int4_g128_zp", 4.1875},
                         Row{"int4_g32", 4.5}, Row{"int8_row", 8 + 32.0 / 4096}, Row{"fp8_row", 8 + 32.0 / 4096}}) {
    const QuantizedMatrix matrix = storage(format_named(row.name), 3, 4096);
    const std::size_t global = matrix.global_scale.given() ? 4 : 0;
    EXPECT_EQ(static_cast<double>(storage_bytes(matrix) - global), row.bits * 3 * 4096 / 8) << row.name;
  }
  EXPECT_EQ(storage(format_named("e2m1_row"), 2, 7).codes.shape[1], 4);
  EXPECT_EQ(storage(format_named("int8_row"), 2, 7).codes.dtype, DType::i8);
  EXPECT_EQ(storage(format_named("fp8_row"), 0, 0).codes.elements(), 0);
  try {
    storage(format_named("nvfp4"), 2, 40);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "[lowbit] K is 40: nvfp4 needs a multiple of its group, 16; the next is 48");
  }
  EXPECT_THROW(storage(format_named("nvfp4"), -1, 16), Error);
  EXPECT_THROW(storage(format_named("int8_row"), 1, std::int64_t{1} << 40), Error);
}

TEST(Rules, NamesComeBack) {
  for (const ScaleRule rule : {ScaleRule::plain, ScaleRule::four_six, ScaleRule::mse, ScaleRule::floor,
                               ScaleRule::round_up, ScaleRule::even}) {
    EXPECT_EQ(rule_named(name_of(rule)), rule);
  }
  EXPECT_THROW(rule_named("best"), Error);
}

std::vector<int> exponents(ScaleRule rule, float amax) {
  Candidates candidates;
  find_candidates(format_named("mxfp4"), rule, {.high = amax}, 1.0f, candidates);
  std::vector<int> found;
  for (int i = 0; i < candidates.count; ++i) {
    EXPECT_EQ(candidates.scale[i], std::ldexp(1.0, static_cast<int>(candidates.stored[i]) - 127));
    found.push_back(static_cast<int>(candidates.stored[i]) - 127);
  }
  return found;
}

TEST(Rules, PowersOfTwoAsTheirFormulasSay) {
  for (int e = -100; e <= 100; ++e) {
    for (const double mantissa : {1.0, 1.0000001, 1.25, 1.4999999, 1.5, 1.5000001, 1.7499999, 1.75, 1.9999999}) {
      const auto amax = static_cast<float>(std::ldexp(mantissa, e));
      const double exact = amax;
      const int floor = static_cast<int>(std::floor(std::log2(exact))) - 2;
      int up = floor - 3;
      while (std::ldexp(6.0, up) < exact) ++up;
      const int even = exact >= std::ldexp(1.75, e) ? e + 1 - 2 : e - 2;
      EXPECT_EQ(exponents(ScaleRule::floor, amax), std::vector<int>{floor}) << amax;
      EXPECT_EQ(exponents(ScaleRule::round_up, amax), std::vector<int>{up}) << amax;
      EXPECT_EQ(exponents(ScaleRule::plain, amax), std::vector<int>{up}) << amax;
      EXPECT_EQ(exponents(ScaleRule::even, amax), std::vector<int>{even}) << amax;
      std::vector<int> found = exponents(ScaleRule::mse, amax);
      EXPECT_EQ(found[0], up);
      std::ranges::sort(found);
      EXPECT_EQ(found, (std::vector<int>{floor - 1, floor, floor + 1, floor + 2})) << amax;
    }
  }
  EXPECT_EQ(exponents(ScaleRule::plain, 0.0f), std::vector<int>{-127});
}

TEST(Rules, NvScalesAroundTheLargestWeight) {
  const Format format = format_named("nvfp4");
  EXPECT_EQ(own_global_scale(ScaleRule::plain, 2688.0f), 1.0f);
  EXPECT_EQ(own_global_scale(ScaleRule::four_six, 1536.0f), 1.0f);
  EXPECT_EQ(own_global_scale(ScaleRule::mse, 0.0f), 1.0f);
  EXPECT_EQ(own_global_scale(ScaleRule::plain, 1e-43f), 1.0f);
  Candidates candidates;
  find_candidates(format, ScaleRule::plain, {.high = 6.0f}, 0.5f, candidates);
  ASSERT_EQ(candidates.count, 1);
  EXPECT_EQ(candidates.stored[0], E4M3::nearest(2.0f).bits);
  EXPECT_EQ(candidates.scale[0], 1.0f);
  find_candidates(format, ScaleRule::four_six, {.high = 12.0f}, 1.0f, candidates);
  ASSERT_EQ(candidates.count, 2);
  EXPECT_EQ(candidates.scale[0], 2.0f);
  EXPECT_EQ(candidates.scale[1], 3.0f);
  find_candidates(format, ScaleRule::mse, {.high = 6.0f}, 1.0f, candidates);
  ASSERT_EQ(candidates.count, 12);
  EXPECT_EQ(candidates.stored[0], E4M3::nearest(1.0f).bits);
  std::sort(candidates.stored.begin(), candidates.stored.begin() + 12);
  for (unsigned i = 0; i < 12; ++i) EXPECT_EQ(candidates.stored[i], E4M3::nearest(1.0f).bits + i - 4u);
  find_candidates(format, ScaleRule::mse, {.high = 1e-30f}, 1.0f, candidates);  // below the least scale
  for (int i = 1; i < candidates.count; ++i) EXPECT_GE(candidates.stored[i], 1u);
  find_candidates(format, ScaleRule::mse, {.high = 6e6f}, 1.0f, candidates);  // above the largest
  for (int i = 0; i < candidates.count; ++i) EXPECT_LE(candidates.stored[i], 126u);
  find_candidates(format, ScaleRule::mse, {.high = 0.0f}, 1.0f, candidates);
  ASSERT_EQ(candidates.count, 1);
  EXPECT_EQ(candidates.stored[0], 0u);
}

TEST(Rules, ZeroPointsAndGrids) {
  Candidates candidates;
  find_candidates(format_named("int4_g32_zp"), ScaleRule::plain, {.low = -1.0f, .high = 2.0f}, 0, candidates);
  ASSERT_EQ(candidates.count, 1);
  EXPECT_EQ(candidates.scale[0], f16_to_f32(f32_to_f16(0.2f)));
  EXPECT_EQ(candidates.zero[0], 5.0f);
  find_candidates(format_named("int4_g32"), ScaleRule::mse, {.high = 7.0f}, 0, candidates);
  ASSERT_EQ(candidates.count, kFactors);
  EXPECT_EQ(candidates.scale[0], 1.0f);
  EXPECT_EQ(candidates.zero[0], 8.0f);
  std::sort(candidates.scale.begin(), candidates.scale.begin() + kFactors);
  for (int i = 0; i < kFactors; ++i) EXPECT_EQ(candidates.scale[i], static_cast<float>(i + 9) / 32);
  find_candidates(format_named("e2m1_row"), ScaleRule::plain, {.high = 0.0f}, 0, candidates);
  EXPECT_EQ(candidates.scale[0], 1e-8f);
}

}  // namespace
}  // namespace heddle::lowbit
