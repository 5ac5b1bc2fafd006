// What tensors of whole models are held to: the rule of docs/numerics.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/dtypes.h"
#include "kit/compare.h"

namespace heddle::test {

// One tensor of rows of `width` elements, in double and as the plain computation has it in each order of summation.
struct ExpectedTensor {
  std::string name;
  std::int64_t width = 1;
  DType dtype = DType::f32;  // what it is written in
  std::vector<double> exact = {};
  kit::PlainTensor plain = {};

  template <class T>
  void expect_right(const std::vector<T>& found) const {
    expect_right(found, kit::factor_of(static_cast<std::int64_t>(exact.size())));
  }
  template <class T>
  void expect_right(const std::vector<T>& found, double factor) const {
    SCOPED_TRACE(name);
    const std::vector<double> values(found.begin(), found.end());
    const auto count = static_cast<std::int64_t>(exact.size());
    const std::vector<std::int64_t> shape = {count / width, width};
    EXPECT_EQ(kit::blind_spots(name, exact, plain, shape, dtype, factor), "");
    const kit::Comparison verdict = kit::compare(name, values, exact, plain, shape, dtype, factor);
    EXPECT_TRUE(verdict.passed) << verdict.worst << "; error " << verdict.error << ", allowed " << verdict.bound;
  }
};

// Appends rows to a tensor's values.
template <class T>
void append(const std::vector<std::vector<T>>& rows, std::vector<double>& to) {
  for (const std::vector<T>& row : rows) to.insert(to.end(), row.begin(), row.end());
}

}  // namespace heddle::test
