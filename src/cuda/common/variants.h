// How the instantiations of a kernel are listed, compiled and found. The kernel's folder has a table in variants.h,
//
//   constexpr DType kTypes[] = {DType::bf16, DType::f16};
//   constexpr Row kVariants[] = {
//       {.name = "d64 softcap", .tiles = {.head = 64, .keys = 128}},
//   };
//   template <DType kType, int kRow>
//   struct Instance {
//     static Variant variant();
//   };
//
// whose every row is compiled for every type. CMake reads types and names (cmake/variants.cmake) and writes the
// sources:
//
//   template struct Instance<DType::bf16, row_named(kVariants, "d64 softcap")>;
//
// variant() is defined in launch.cuh, with the device's code. The host sees the table, and gets all variants of a type
// from variants_of(). A folder with other rows for other types has several tables, k...Types and k...Variants.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "heddle/tensor.h"

namespace heddle::cuda {

// The number of the row of that name; does not compile without one.
template <class Row, std::size_t kRows>
consteval int row_named(const Row (&rows)[kRows], std::string_view name) {
  for (std::size_t i = 0; i < kRows; ++i) {
    if (rows[i].name == name) return static_cast<int>(i);
  }
  throw "no row of the table has this name";
}

template <class Row, std::size_t kRows>
consteval bool all_named(const Row (&rows)[kRows]) {
  for (std::size_t i = 0; i < kRows; ++i) {
    if (rows[i].name.empty() || row_named(rows, rows[i].name) != static_cast<int>(i)) return false;
  }
  return true;
}

// What Instance says of each row for `type`, in the table's order; none if `type` is none of kTypes.
template <template <DType, int> class Instance, const auto& kTypes, const auto& kRows>
auto variants_of(DType type) {
  static_assert(all_named(kRows), "each row has a name of its own");
  constexpr std::size_t kCount = std::size(kRows);
  static const auto all = []<std::size_t... kNumber>(std::index_sequence<kNumber...>) {
    return std::array{Instance<kTypes[kNumber / kCount], static_cast<int>(kNumber % kCount)>::variant()...};
  }
  (std::make_index_sequence<std::size(kTypes) * kCount>());
  std::span found(all);
  for (std::size_t i = 0; i < std::size(kTypes); ++i) {
    if (kTypes[i] == type) return found.subspan(i * kCount, kCount);
  }
  return found.first(0);
}

// The one to take, of several that are listed with the best first.
template <class Variant, class Takes>
const Variant& first_that(std::span<const Variant> variants, Takes takes) {
  const auto found = std::find_if(variants.begin(), variants.end(), takes);
  if (found == variants.end()) throw std::logic_error("no variant takes a call that its candidate supports");
  return *found;
}

}  // namespace heddle::cuda
