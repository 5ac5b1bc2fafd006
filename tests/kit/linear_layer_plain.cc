// The plain computation of a linear layer.
#include <cmath>

#include "kit/activations.h"
#include "kit/linear_operands.h"

namespace heddle::kit {

std::vector<float> LinearLayer::plain_operands(std::int64_t m, Order order) const {
  std::vector<float> row(static_cast<std::size_t>(c_.K)), squares;
  for (std::int64_t k = 0; k < c_.K; ++k) row[k] = static_cast<float>(x.get(m * c_.K + k));
  if (c_.norm != Norm::none) {
    const auto count = static_cast<float>(c_.K);
    const float mean = c_.norm == Norm::layer_norm ? sum(order, row) / count : 0;
    for (float& v : row) {
      v -= mean;
      squares.push_back(v * v);
    }
    const float inverse = 1 / std::sqrt(sum(order, squares) / count + c_.norm_eps);
    for (std::int64_t k = 0; k < c_.K; ++k) {
      row[k] *= inverse;
      if (norm_weight.given()) row[k] *= static_cast<float>(norm_weight.get(k));
      if (norm_bias.given()) row[k] += static_cast<float>(norm_bias.get(k));
      row[k] = static_cast<float>(rounded(row[k], c_.dtype));
    }
  }
  round_operands(c_, row);
  return row;
}

Summation LinearLayer::summation(Order order) const {
  if (has_e4m3_products(c_) && order == Order::blocks) return {order, 13, 32, 128};
  if (c_.dtype != DType::f32 && order == Order::blocks) return {order, 24, 16};
  Summation out{order};
  out.fma = c_.dtype == DType::f32;
  return out;
}

std::vector<double> LinearLayer::plain_sums(std::int64_t m, Order order) const {
  const std::vector<float> row = plain_operands(m, order);
  std::vector<float> sums(static_cast<std::size_t>(c_.N));
  sum_products(summation(order), c_.K, row.data(), 1, weight_columns_.data(), c_.N, c_.N, sums.data());
  std::vector<double> out;
  for (std::int64_t n = 0; n < c_.N; ++n) {
    const float b = c_.bias ? static_cast<float>(bias.get(n)) : 0;
    out.push_back(rounded(sums[n] + b, c_.dtype));
  }
  return out;
}

std::vector<double> LinearLayer::plainly(Order order) const {
  const auto round = [this](double value) { return rounded(value, c_.dtype); };
  std::vector<double> out;
  for (std::int64_t m = 0; m < M_; ++m) {
    const std::vector<double> z = plain_sums(m, order);
    for (std::int64_t j = 0; j < outputs_; ++j) {
      const auto sum = [&](std::int64_t n) { return static_cast<float>(z[static_cast<std::size_t>(n)]); };
      double y;
      if (c_.activation == Activation::swiglu) {
        const double silu = round(activations::plain_value(Activation::silu, sum(2 * j)));
        y = round(static_cast<float>(silu) * sum(2 * j + 1));
      } else {
        y = round(activations::plain_value(c_.activation, sum(j)));
      }
      if (c_.residual) y = round(static_cast<float>(y) + static_cast<float>(residual.get(m * outputs_ + j)));
      out.push_back(y);
    }
  }
  return out;
}

}  // namespace heddle::kit
