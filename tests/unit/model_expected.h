// What tensors of whole models are held to: the rule of docs/numerics.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtypes.h"
#include "kernels/within_rule.h"

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
    const std::vector<double> values(found.begin(), found.end());
    const auto count = static_cast<std::int64_t>(exact.size());
    kit::expect_within_rule(name, values, exact, plain, {count / width, width}, dtype, factor);
  }
};

// Appends rows to a tensor's values.
template <class T>
void append(const std::vector<std::vector<T>>& rows, std::vector<double>& to) {
  for (const std::vector<T>& row : rows) to.insert(to.end(), row.begin(), row.end());
}

}  // namespace heddle::test
