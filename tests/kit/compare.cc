#include "kit/compare.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace heddle::kit {
namespace {

constexpr double kRoundoffTf32 = 0x1p-11;

double roundoff(DType dtype) { return std::exp2(dtype == DType::f32 ? -24 : dtype == DType::f16 ? -11 : -9); }

// Of sums of products: tensor cores add e4m3 products with 14 bits, cutting off the rest.
double roundoff_of_sums(DType operands) { return operands == DType::f8e4m3 ? std::exp2(-13) : roundoff(DType::f32); }

// |x - y|; 0 where both are the same infinity or both NaN, NaN where only one of them is finite.
double difference(double x, double y) {
  if (std::isfinite(x) && std::isfinite(y)) return std::abs(x - y);
  const bool same = std::isnan(x) ? std::isnan(y) : x == y;
  return same ? 0 : std::nan("");
}

std::string coordinate(std::int64_t n, const std::vector<std::int64_t>& shape) {
  std::string out;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    out = text(n % shape[axis], out.empty() ? "" : ", ", out);
    n /= shape[axis];
  }
  return "[" + out + "]";
}

}  // namespace

double floor_of(const PlainTensor& plain, std::span<const double> reference, DType dtype, DType operands) {
  double floor = 4 * roundoff_of_sums(operands) * plain.terms;
  if (operands == DType::bf16 || operands == DType::f16) floor += 2 * roundoff(operands) * plain.delta;
  if (dtype != DType::f32 || plain.tf32) {
    double largest = 0;
    for (double x : reference) {
      if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
    }
    if (dtype != DType::f32) floor += roundoff(dtype) * largest;
    if (plain.tf32) floor += kRoundoffTf32 * (3 * largest + 4 * plain.delta);
  }
  if (operands == DType::f16) floor += std::exp2(-24);
  return floor;
}

Comparison compare(const std::string& tensor, std::span<const double> out, std::span<const double> reference,
                   const PlainTensor& plain, const std::vector<std::int64_t>& shape, DType dtype, DType operands,
                   double factor) {
  Comparison result;
  result.tensor = tensor;
  result.compared = static_cast<std::int64_t>(reference.size());
  if (out.size() != reference.size() || plain.values.size() != reference.size()) {
    throw Error(text("[compare] ", tensor, ": ", out.size(), " values, ", reference.size(), " in the reference and ",
                     plain.values.size(), " in the plain computation"));
  }
  std::int64_t worst = -1;
  for (std::size_t n = 0; n < reference.size(); ++n) {
    const double plain_error = difference(plain.values[n], reference[n]);
    if (std::isnan(plain_error)) {
      throw Error(text("[compare] ", tensor, coordinate(static_cast<std::int64_t>(n), shape),
                       ": the plain computation gives ", plain.values[n], " for ", reference[n],
                       ", so this case sets no bound"));
    }
    result.plain_error = std::max(result.plain_error, plain_error);
    const double error = difference(out[n], reference[n]);
    if (std::isnan(result.error)) continue;  // the first NaN is the one to name
    if (worst < 0 || !(error <= result.error)) {
      result.error = error;
      worst = static_cast<std::int64_t>(n);
    }
  }
  result.floor = floor_of(plain, reference, dtype, operands);
  result.bound = factor * result.plain_error + result.floor;
  result.passed = result.error <= result.bound;  // false for NaN
  if (worst >= 0) {
    result.worst = text(tensor, coordinate(worst, shape), " is ", out[worst], ", the reference ", reference[worst]);
  }
  return result;
}

}  // namespace heddle::kit
