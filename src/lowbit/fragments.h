// Weights in the order in which tensor cores want them as the left operand of Y^T = W X^T: blocks of 64 rows and 128
// columns (64 columns of 8-bit codes), [N / 64][K / 128], what is missing of the last ones zero. One order for 16-bit
// products, whose operands of a warp (mma.m16n8k16) and of a warpgroup (wgmma m64k16) lie alike, and one for e4m3
// products (wgmma m64k32).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "heddle/linear.h"
#include "heddle/runtime.h"
#include "lowbit/matrix.h"

namespace heddle::lowbit {

constexpr int kBlockRows = 64, kBlockColumns = 128;

// For 16-bit products. Thread t of 128 has of each step of 16 columns 8 weights in a word: rows r = 16 (t / 32) +
// t % 32 / 4 and r + 8, columns c = 2 (t % 4), c + 1, c + 8 and c + 9. Those that the product wants in register i are,
// column c or c + 8 in the low half of the word, the other one in the high half:
//   register 0: row r, columns c and c + 1          1: row r + 8, columns c and c + 1
//            2: row r, columns c + 8 and c + 9      3: row r + 8, columns c + 8 and c + 9
// E2M1: where a word has the sign of the low half's column, and the three bits of its magnitude from the highest on;
// the high half's lie 16 further on, modulo 32:
//   register 0: 15, 8 7 6     1: 18, 11 10 9     2: 21, 14 13 12     3: 1, 0 4 3
// Register 0 is a mask away from a bfloat16, times 2^-126, registers 1 and 2 a rotation by 3 and by 6 more, register 3
// a multiplication (cuda/any/linear/e2m1.cuh). float16 takes them times 2^-14.
struct FragmentBlock {
  static constexpr int kSteps = kBlockColumns / 16, kGroup = 16;
  std::uint32_t codes[kSteps / 4][128][4];  // a thread's words of four steps side by side
  // Of 16 columns of a row: 5 bits of exponent, 3 of mantissa, (1 + m / 8) 2^(e - 15), kScaleFactor times the scale. So
  // an E4M3 scale fits exactly, also where it is subnormal.
  std::uint8_t scales[kBlockRows][kBlockColumns / kGroup];
  static constexpr float kScaleFactor = 128;
  // Of mxfp4's scales under the largest of their row: what is less becomes 0.
  static constexpr int kLeastExponent = -29;
};
static_assert(sizeof(FragmentBlock) == 4608);

// For 16-bit products too, formats other than E2M1: codes, and behind them what scales the group sums, as
// block_layout() says. A thread has rows and columns as above.
//   int4     A word of a step: nibble i of the low half is register i's code of column c (or c + 8), that of the high
//            half the next column's.
//   nf4, fp4 A word of a step: byte i has register i's codes, of column c (or c + 8) in the low nibble, of the next one
//            in the high nibble.
//   8 bits   Two words of a step, registers 0 and 1, and 2 and 3, in bytes: column c (or c + 8), the next one. int8 as
//            code + 128.
struct FragmentCodes {
  std::uint32_t words[2][128][4];  // a thread's words of four steps, or of two, side by side
};
static_assert(sizeof(FragmentCodes) == 4096);

constexpr bool is_e2m1(const Format& format) {
  return format.element == Element::e2m1 || format.element == Element::e2m1_row;
}

// A block of order fragments16, by its format. Scales lie as [groups][64 rows], f16 for int4 and f32 for nf4 and
// fp4_bnb; zero points behind them as u8 [groups][64]. A group of more than 128 columns has its scale in each of its
// blocks. E2M1: FragmentBlock. 8 bits: no scales, they are the row's.
struct BlockLayout {
  int columns = 128;
  int groups = 0;             // of a row's columns in a block: 1, 2 or 4; 0: no scales behind the codes
  int scales = 0, zeros = 0;  // offsets in bytes; zeros: 0 if there are none
  int bytes = 0;
};
constexpr BlockLayout block_layout(const Format& format) {
  constexpr int kCodes = sizeof(FragmentCodes);
  if (is_e2m1(format)) return {.bytes = sizeof(FragmentBlock)};
  if (format.element == Element::int8 || format.element == Element::e4m3) return {.columns = 64, .bytes = kCodes};
  const int groups = format.group < kBlockColumns ? kBlockColumns / static_cast<int>(format.group) : 1;
  const int end = kCodes + groups * kBlockRows * (format.scale == ScaleType::f32 ? 4 : 2);
  return {.groups = groups,
          .scales = kCodes,
          .zeros = format.zero_points ? end : 0,
          .bytes = format.zero_points ? end + groups * kBlockRows : end};
}
constexpr int kMostGroups = kBlockColumns / 32;
static_assert(block_layout({.element = Element::int4, .scale = ScaleType::f16, .group = 128}).bytes == 4224);
static_assert(
    block_layout({.element = Element::int4, .scale = ScaleType::f16, .group = 32, .zero_points = true}).bytes == 4864);
static_assert(block_layout({.element = Element::nf4, .group = 64}).bytes == 4608);
// 128 + zero is then a bfloat16.
constexpr int kMostZero = 127;

// What codes of nf4 and fp4_bnb stand for, times lookup_factor(), which makes fp4's integers of few bits.
constexpr float lookup_factor(Element element) { return element == Element::fp4_bnb ? 192.0f : 1.0f; }
std::array<float, 16> lookup_values(Element element);

// For e4m3 products. Thread t has of each step of 32 columns 16 weights in two words, one for row r, one for row r + 8:
// columns c = 4 (t % 4) to c + 3, and c + 16 to c + 19, bytes of two registers. Nibbles 0 to 3 of a word hold the
// magnitudes of the first, nibbles 4 to 7 those of the second; the first's signs are bit 3 of nibbles 1, 3, 5 and 7,
// the second's bit 3 of nibbles 0, 2, 4 and 6.
struct FragmentBlock8 {
  static constexpr int kSteps = kBlockColumns / 32, kGroup = 32;
  std::uint32_t codes[kSteps / 2][128][4];  // a thread's words of two steps side by side
  // Of 32 columns of a row, 0 to kMaxExponent: weight = row scale * 2^exponent * code.
  std::uint8_t exponents[kBlockRows][kBlockColumns / kGroup];
  static constexpr int kMaxExponent = 11;
};
static_assert(sizeof(FragmentBlock8) == 4352);

// The same for nvfp4, whose groups are 16 columns: thread t has of each step of 32 columns the 8 of a row from column
// 8 (t % 4) on, so that they share a scale: the first 4 as columns 4 (t % 4) of the product, the others as its columns
// 16 + 4 (t % 4). x is put into the same order. What is multiplied is an E4M3, scale times magnitude, rounded to
// nearest even; a magnitude's index is its code but that those of 3 and of 4 change places.
//
// In E4M3's bits 8 more are twice as much, and 1.5 times as much are 4 or 5 more, by the scale's mantissa alone:
// rounded, (1 + m / 8) 1.5 is 5 more for m of 1 to 5, 4 more for 0, 6 and 7.
struct ScaledBlock8 {
  static constexpr int kSteps = kBlockColumns / 32, kGroup = 16;
  std::uint32_t codes[kSteps / 2][128][4];  // a thread's words of two steps side by side
  // Of a row's groups, by half of the block, by half of a step, by step: bits of an E4M3, kLeast to kMost, and bit 7
  // set where 1.5 times as much are 4 more.
  std::uint8_t scales[kBlockRows][2][2][kSteps / 2];
  // The least whose half is a normal number, and the most that 6 times as much leave below E4M3's end.
  static constexpr int kLeast = 16, kMost = 105;
  static constexpr std::uint8_t stored(int bits) {
    return static_cast<std::uint8_t>(bits | (bits % 8 == 0 || bits % 8 >= 6 ? 0x80 : 0));
  }
};
static_assert(sizeof(ScaledBlock8) == 4608);
constexpr bool has_scaled_blocks(const Format& format) { return format.scale == ScaleType::e4m3; }

constexpr std::int64_t blocks_of_rows(std::int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }
constexpr std::int64_t blocks_of_columns(std::int64_t columns) { return (columns + kBlockColumns - 1) / kBlockColumns; }

// Packed weights of such an order: a scale for each place of a row, f32 [row_blocks][64], then the blocks,
// [row_blocks][column_blocks].
struct FragmentLayout {
  std::int64_t row_blocks = 0, column_blocks = 0, blocks = 0, bytes = 0;  // blocks: where they begin, bytes
};
FragmentLayout fragment_layout(const Format& format, WeightOrder order, std::int64_t rows, std::int64_t columns);

// Which row of W stands where a kernel has row `place`. Gated: W's rows are gates and ups in turn; of 16 places the
// first 8 have gates, the others the ups of the same outputs.
constexpr std::int64_t row_at(std::int64_t place, bool gated) {
  return gated ? place / 16 * 16 + place % 8 * 2 + place % 16 / 8 : place;
}

constexpr std::int64_t place_of(std::int64_t row, bool gated) {
  return gated ? row / 16 * 16 + row % 2 * 8 + row % 16 / 2 : row;
}

// E2M1 formats: nvfp4, mxfp4 and e2m1_row. Weights are code * scale * row scale. Exact, except that in mxfp4 a block
// whose scale is less than 2^-29 of the row's largest becomes 0. Scales are finite, here and below, to which
// pack_weights() sees, and not negative.
void pack(const Matrix& matrix, bool gated, FragmentBlock* blocks, float* row_scales, Executor& executor);
// mxfp4 and e2m1_row. Exact where the scales of a row span at most kMaxExponent binades; weights of smaller ones are
// rounded to multiples of half the row scale.
void pack(const Matrix& matrix, bool gated, FragmentBlock8* blocks, float* row_scales, Executor& executor);
// nvfp4. row scale = global scale times the power of two that takes the row's largest scale to bits 98 to kMost.
// Weights of groups whose scale is then below kLeast, and so less than 2^-10 of the largest, are rounded to those of
// kLeast: they err by less than that 2^-10.
void pack(const Matrix& matrix, bool gated, ScaledBlock8* blocks, float* row_scales, Executor& executor);
// Of packed weights in order fragments8 what a product multiplies, [row, column] of W.
float value8(const Format& format, const std::byte* data, const FragmentLayout& layout, bool gated, std::int64_t row,
             std::int64_t column);
// int4, nf4, fp4_bnb, int8_row and fp8_row, codes and scales to the bit; fp4's rows have scale 1 / 192. Zero points are
// at most kMostZero.
void pack_codes(const Matrix& matrix, bool gated, std::byte* blocks, float* row_scales, Executor& executor);

}  // namespace heddle::lowbit
