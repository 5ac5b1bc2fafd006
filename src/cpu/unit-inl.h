// A unit is what multiplies matrices on a target, as a type: its operands and its product. All kernels are templates of
// one. A target names a file of units/ (HEDDLE_TARGET_UNITS) that says which are Bf16Unit and ByteUnit, of operands of
// bf16 and of bytes; f32's is F32Unit on all.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/gemm-inl.h"
#include "cpu/plan.h"
#include "cpu/simd-inl.h"
#include "cpu/units/f32-inl.h"
#include "problem/band.h"
#include HEDDLE_TARGET_UNITS

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// Whether bf16 operands have another unit than f32's.
constexpr bool kHasBf16Unit = !std::is_same_v<Bf16Unit, F32Unit>;

// What a unit says. Its product is C[m, lane] (+)= sum_k A(m, k) B[k, lane], as in gemm-inl.h.
//   Element, Word   a number of an operand, and those that lie side by side along the summed dimension
//   kTileM          rows m of one product
//   kDepth          elements that one step of the product sums
//   kPad            head sizes and keys of a tile are padded to its multiples, and so to kTileM's and kDepth's
//   kRounds         tiles of f32 are no operands yet: PackTile and PackLanes fill `to`, else they return the tile
//   Product<N, S>   one tile with N vectors of lanes, over so many words; the last step may be a part of one
//   PackRow         a row of a tensor as elements, with zeros up to `padded`
//   PackTile        rows [begin, end) of a tile of f32 [m][k] as operand A, both `row` elements apart
//   PackLanes       words [begin, end) of a tile of f32 [k][lane], `row` apart, as operand B from the first on
//   PackLaneRow     row k of an operand B of `width` lanes from what put(elements) writes; rows come in order,
//                   and `line` keeps them, `width` f32, until a word is full
//   PackWord        a vector of words of operand B from their f32, which are elements already if kExact
//   PackElements    a vector of elements of operand A from f32
//   PanelPacker     rows, kDepth at a time, as panels: operand A whose m are the columns. It remembers whether
//                   a value was infinite or NaN
//   PanelStride, PanelWords, Panel, PanelWord
//                   their layout
//   ClearRow        makes one row of a panel's word zero
template <class U>
concept Unit = requires(typename U::Word word, typename U::PanelPacker panels, std::int64_t n) {
  typename U::Element;
  requires U::kPad % U::kTileM == 0 && U::kPad % U::kDepth == 0;
  requires sizeof(typename U::Word) % sizeof(typename U::Element) == 0;
  { U::kRounds } -> std::convertible_to<bool>;
  panels.put(&word, n);
  { panels.non_finite() } -> std::same_as<bool>;
  { U::PanelWords(n, n) } -> std::same_as<std::int64_t>;
  { U::Panel(&word, n, n, n) } -> std::same_as<Broadcasts<typename U::Word>>;
  U::ClearRow(word, n);
};
static_assert(Unit<F32Unit> && Unit<Bf16Unit>);

// What a unit of bytes says: sum + the four products of each lane, x s8.
//   Dot         codes u8 up to 24
//   DotSigned   w s8, given with kOffset added, as u8; the sum is then kOffset times that of x too large
// Words of so many elements.
template <Unit U>
constexpr std::int64_t Words(std::int64_t elements) {
  return elements / static_cast<std::int64_t>(sizeof(typename U::Word) / sizeof(typename U::Element));
}

// Words [begin, end) of the summed dimension that hold elements [begin, end), in whole steps of the product.
template <Unit U>
constexpr Interval<std::int64_t> DepthWords(Interval<std::int64_t> elements) {
  return {Words<U>(elements.begin / U::kDepth * U::kDepth), Words<U>(round_up(elements.end, U::kDepth))};
}

// Calls run.template operator()<U>() with the unit of operands that are multiplied in bf16, or of all others.
template <class Run>
HWY_INLINE auto WithUnit(bool in_bf16, const Run& run) {
  if constexpr (kHasBf16Unit) {
    if (in_bf16) return run.template operator()<Bf16Unit>();
  }
  return run.template operator()<F32Unit>();
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
