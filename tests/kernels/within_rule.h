// A tensor held to the rule of docs/numerics.md, which must be able to refuse it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kit/compare.h"

namespace heddle::kit {

inline void expect_within_rule(const std::string& name, std::span<const double> found, const std::vector<double>& exact,
                               const PlainTensor& plain, const std::vector<std::int64_t>& shape, DType dtype,
                               double factor) {
  EXPECT_EQ(blind_spots(name, exact, plain, shape, dtype, factor), "");
  const Comparison c = compare(name, found, exact, plain, shape, dtype, factor);
  EXPECT_TRUE(c.passed) << c.tensor << " is off by " << c.error << ", allowed " << c.bound << "; " << c.worst;
}

inline void expect_within_rule(const Judged& x) {
  const TensorView& view = x.out->view();
  expect_within_rule(x.name, x.out->values(), *x.reference, *x.plain,
                     {view.shape.begin(), view.shape.begin() + view.rank}, view.dtype, x.factor);
  EXPECT_EQ(x.out->damage(), "") << x.name;
}

}  // namespace heddle::kit
