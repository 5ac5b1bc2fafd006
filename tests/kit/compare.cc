#include "kit/compare.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "core/check.h"

namespace heddle::kit {
namespace {

// Half of the distance between the dtype's numbers about x.
double half_ulp(double x, DType dtype) {
  if (x == 0) return 0;
  const int bits = dtype == DType::f32 ? 24 : dtype == DType::f16 ? 11 : 8;
  const int exponent = std::max(std::ilogb(x), dtype == DType::f16 ? -14 : -126);
  return std::ldexp(1.0, exponent - bits);
}

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

// FNV-1a, 64 bits.
std::uint64_t digest_of(std::span<const double> values) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const double value : values) {
    for (const std::uint8_t byte : std::bit_cast<std::array<std::uint8_t, sizeof value>>(value)) {
      hash = (hash ^ byte) * 0x100000001b3;
    }
  }
  return hash;
}

std::vector<std::int64_t> shape_of(const HostTensor& x) {
  const TensorView& view = x.view();
  return {view.shape.begin(), view.shape.begin() + view.rank};
}

}  // namespace

Comparison compare(const std::string& tensor, std::span<const double> out, std::span<const double> reference,
                   const PlainTensor& plain, const std::vector<std::int64_t>& shape, DType dtype, double factor) {
  Comparison result;
  result.tensor = tensor;
  result.compared = static_cast<std::int64_t>(reference.size());
  result.digest = digest_of(out);
  const auto place = [&](std::size_t n) { return tensor + coordinate(static_cast<std::int64_t>(n), shape); };
  for (const std::vector<double>& values : plain.values) {
    if (out.size() != reference.size() || values.size() != reference.size()) {
      throw Error(text("[compare] ", tensor, ": ", out.size(), " values, ", reference.size(), " in the reference and ",
                       values.size(), " in the plain computation"));
    }
    for (std::size_t n = 0; n < reference.size(); ++n) {
      const double error = difference(values[n], reference[n]);
      if (std::isnan(error)) {
        throw Error(text("[compare] ", place(n), ": the plain computation gives ", values[n], " for ", reference[n],
                         ", so this case sets no bound"));
      }
      result.plain_error = std::max(result.plain_error, error);
    }
  }
  std::size_t worst = 0;
  for (std::size_t n = 0; n < reference.size(); ++n) {
    if (std::isfinite(reference[n])) result.largest = std::max(result.largest, std::abs(reference[n]));
    const double error = difference(out[n], reference[n]);
    if (std::isnan(result.error)) continue;  // the first NaN is the one to name
    if (!(error <= result.error)) {
      result.error = error;
      worst = n;
    }
  }
  const double rounding = half_ulp(result.largest, dtype);
  result.plain_error = std::max({result.plain_error, rounding, half_ulp(plain.largest_term, DType::f32)});
  result.bound = std::max(factor * result.plain_error, kFactor * rounding);  // codes may be exact
  result.passed = result.error <= result.bound;                              // false for NaN
  if (!reference.empty()) {
    result.worst = text(place(worst), " is ", out[worst], ", the reference ", reference[worst]);
  }
  return result;
}

std::string blind_spots(const std::string& tensor, std::span<const double> reference, const PlainTensor& plain,
                        const std::vector<std::int64_t>& shape, DType dtype, double factor) {
  std::string out;
  std::vector<double> values;
  for (const double value : reference) values.push_back(rounded(value, dtype));
  if (values.empty()) return out;
  const auto judge = [&](const std::vector<double>& found) {
    return compare(tensor, found, reference, plain, shape, dtype, factor);
  };
  const Comparison right = judge(values);
  if (!right.passed) out += text(tensor, ": the reference fails: ", right.worst, "; ");
  // Where the largest is, rounding hides most; where the middle one is, nothing is special.
  const auto largest =
      std::ranges::max_element(values, {}, [](double v) { return std::isfinite(v) ? std::abs(v) : -1; });
  for (const auto at : {largest - values.begin(), static_cast<std::ptrdiff_t>(values.size() / 2)}) {
    std::vector<double> spoilt = values;
    const double change = std::max(16 * right.plain_error, 1e-30);
    spoilt[at] = std::isfinite(values[at]) ? rounded(values[at] + change, dtype) : 0;
    if (spoilt[at] != values[at] && judge(spoilt).passed) out += text(tensor, ": 16 e in one element pass; ");
  }
  // Gradients that are 0 in exact arithmetic have no size to be told from 0 by.
  const bool nothing = right.largest <= 1e-9;
  if (!nothing && judge(std::vector<double>(values.size(), 0)).passed) out += text(tensor, ": zeros pass; ");
  return out;
}

Comparison compare(const Judged& x) {
  return compare(x.name, x.out->values(), *x.reference, *x.plain, shape_of(*x.out), x.out->view().dtype, x.factor);
}

std::string blind_spots(std::span<const Judged> tensors) {
  std::string out;
  for (const Judged& x : tensors) {
    if (!x.out->given()) continue;
    out += blind_spots(x.name, *x.reference, *x.plain, shape_of(*x.out), x.out->view().dtype, x.factor);
  }
  return out;
}

Comparison compare_within(const std::string& tensor, std::span<const double> out, std::span<const double> reference,
                          const std::vector<std::int64_t>& shape, const std::function<double(double)>& allowed) {
  if (out.size() != reference.size()) {
    throw Error(text("[compare] ", tensor, ": ", out.size(), " values and ", reference.size(), " in the reference"));
  }
  Comparison result;
  result.tensor = tensor;
  result.compared = static_cast<std::int64_t>(reference.size());
  result.digest = digest_of(out);
  result.passed = true;
  std::size_t worst = 0;
  double share = -1;
  for (std::size_t n = 0; n < reference.size(); ++n) {
    if (std::isfinite(reference[n])) result.largest = std::max(result.largest, std::abs(reference[n]));
    const double error = difference(out[n], reference[n]);
    const double bound = std::isfinite(reference[n]) ? allowed(reference[n]) : 0;
    const bool passed = error <= bound;
    if (passed && !(error > share * bound)) continue;
    if (!passed && !result.passed) continue;  // the first that fails is the one to name
    result.passed &= passed;
    share = !passed ? std::numeric_limits<double>::infinity() : bound > 0 ? error / bound : 0;
    result.error = error;
    result.bound = bound;
    worst = n;
  }
  if (!reference.empty()) {
    result.worst = text(tensor, coordinate(static_cast<std::int64_t>(worst), shape), " is ", out[worst],
                        ", the reference ", reference[worst]);
  }
  return result;
}

}  // namespace heddle::kit
