// The orders of packed weights: their names, and which of them a layer has.
#include <string>
#include <utility>

#include "core/check.h"
#include "core/names.h"
#include "heddle/error.h"
#include "heddle/linear.h"
#include "lowbit/fragments.h"
#include "lowbit/packed.h"
#include "ops/linear/names.h"

namespace heddle {
namespace {

constexpr NamedValue<WeightOrder> kOrders[] = {
    {"rows16", WeightOrder::rows16}, {"fragments16", WeightOrder::fragments16}, {"fragments8", WeightOrder::fragments8},
    {"matrix", WeightOrder::matrix}, {"matrix8", WeightOrder::matrix8},         {"dense", WeightOrder::dense}};

// Why x cannot be rounded so for weights of this format, wherever they are; empty if it can.
std::string refuse_rounding(const lowbit::Format& format, const PackedUse& use) {
  if (use.int8_x && use.fp8_x) return "int8_x and fp8_x are set: x is rounded one way";
  if (use.int8_x && !lowbit::has_integers(format)) {
    return text("int8_x is set and the format is ", lowbit::name_of(format),
                ": it is for nvfp4, mxfp4, e2m1_row, int4 and int8_row");
  }
  if (use.fp8_x && !lowbit::is_e2m1(format) && format.element != lowbit::Element::e4m3) {
    return text("fp8_x is set and the format is ", lowbit::name_of(format),
                ": it is for nvfp4, mxfp4, e2m1_row and fp8_row");
  }
  return {};
}

// Whether rows of x and y are whole vectors of 16 bytes, as kernels over fragments want them; cuBLASLt takes any.
bool whole_vectors(std::int64_t rows, std::int64_t columns, bool gated) {
  return columns % 8 == 0 && (gated ? rows / 2 : rows) % 8 == 0;
}

}  // namespace

std::vector<std::string> weight_order_names() { return names_in(kOrders); }
WeightOrder weight_order_named(std::string_view name) { return value_named(kOrders, name, "linear", "order"); }
const char* name_of(WeightOrder order) { return name_in(kOrders, order); }

PackedOrder packed_order_for(const lowbit::Format& format, std::int64_t rows, std::int64_t columns,
                             const PackedUse& use) {
  if (std::string refusal = refuse_rounding(format, use); !refusal.empty()) return {.refusal = std::move(refusal)};
  if (use.device == Device::cpu) return {.order = WeightOrder::rows16, .refusal = {}};
  if (use.fp8_x) {
    return {.order = format.element == lowbit::Element::e4m3 ? WeightOrder::matrix8 : WeightOrder::fragments8,
            .refusal = {}};
  }
  if (use.int8_x && format.element != lowbit::Element::int8) {
    return {.refusal = text("int8_x is set and the weights are ", lowbit::name_of(format),
                            ", on a GPU: there it is for int8_row, and fp8_x for nvfp4, mxfp4, e2m1_row and fp8_row")};
  }
  const bool fragments = !use.int8_x && whole_vectors(rows, columns, use.gated);
  return {.order = fragments ? WeightOrder::fragments16 : WeightOrder::matrix, .refusal = {}};
}

}  // namespace heddle
