// The yardstick of linear layers: double precision, one output after the other.
#pragma once

#include <vector>

#include "problem/linear.h"

namespace heddle::reference {

extern const LinearKernel kLinear;
extern const LinearBackwardKernel kLinearBackward;

// A row of x with its norm: x^ = (x - mean) * inverse, and x^ * weight + bias; without a norm, x both times.
struct NormedRow {
  double inverse = 1;
  std::vector<double> unit, values;
};
NormedRow normed_row(const LinearProblem& p, std::int64_t m);
// x[m] as it is multiplied: with int8_x, the f32 nearest to it is rounded.
std::vector<double> row_of(const LinearProblem& p, std::int64_t m);
// (x W^T + bias)[m, n] of such a row.
double sum_of(const LinearProblem& p, const std::vector<double>& x, std::int64_t n);

}  // namespace heddle::reference
