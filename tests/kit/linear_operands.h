// What a linear layer does to rows of x on their way into its products.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/dtypes.h"
#include "kit/linear_layer.h"

namespace heddle::kit {

// x as LinearOptions::int8_x rounds it.
template <class Real>
void round_to_codes(std::vector<Real>& row) {
  float largest = 0;
  for (const Real x : row) largest = std::max(largest, static_cast<float>(std::abs(x)));
  const float scale = largest / 127.0f;
  for (Real& x : row) {
    const float quotient = scale > 0 ? static_cast<float>(x) / scale : 0.0f;
    x = static_cast<Real>(std::min(127.0, std::max(-127.0, std::rint(static_cast<double>(quotient)))) * scale);
  }
}

// x as the pass in front of e4m3 products rounds it.
template <class Real>
void round_to_e4m3(std::vector<Real>& row) {
  constexpr float kLargest = 448.0f;
  float largest = 0;
  for (const Real x : row) largest = std::max(largest, static_cast<float>(std::abs(x)));
  const float factor = largest > 0 ? kLargest / largest : 0.0f;
  for (Real& x : row) {
    x = static_cast<Real>(f8e4m3_to_f32(f32_to_f8e4m3(static_cast<float>(x) * factor))) * (largest / kLargest);
  }
}

inline bool has_e4m3_products(const LinearCase& c) {
  return c.order == WeightOrder::fragments8 || c.order == WeightOrder::matrix8;
}

template <class Real>
void round_operands(const LinearCase& c, std::vector<Real>& row) {
  if (c.int8_x) round_to_codes(row);
  if (has_e4m3_products(c)) round_to_e4m3(row);
}

}  // namespace heddle::kit
