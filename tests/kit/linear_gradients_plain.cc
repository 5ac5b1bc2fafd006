// The plain computation of a linear layer's gradients.
#include <cmath>

#include "kit/activations.h"
#include "kit/linear_gradients.h"

namespace heddle::kit {

using namespace activations;

// As LinearGradientLayer::Row has them, each rounded to x's dtype but x^, which is f32.
struct LinearGradientLayer::PlainRow {
  std::vector<float> unit, dz, d;
  float inverse = 1;
};

LinearGradientLayer::PlainRow LinearGradientLayer::plain_row(std::int64_t m, Order order) const {
  const LinearCase& c = layer.given();
  PlainRow r;
  const auto round = [&c](double value) { return rounded(value, c.dtype); };
  const std::vector<double> z = layer.plain_sums(m, order);
  const bool gated = c.activation == Activation::swiglu;
  const std::int64_t outputs = gated ? c.N / 2 : c.N;
  for (std::size_t n = 0; n < z.size(); ++n) {
    const double d = dy.get(m * outputs + static_cast<std::int64_t>(gated ? n / 2 : n));
    const auto gradient = static_cast<float>(d), other = static_cast<float>(z[gated && n % 2 == 0 ? n + 1 : n]);
    float dz = gradient;
    if (!gated) {
      dz *= plain_slope(c.activation, static_cast<float>(z[n]));
    } else if (n % 2 == 0) {
      dz *= other * plain_slope(Activation::silu, static_cast<float>(z[n]));
    } else {
      dz *= static_cast<float>(round(plain_value(Activation::silu, static_cast<float>(z[n - 1]))));
    }
    r.dz.push_back(static_cast<float>(round(dz)));
  }
  r.d.resize(static_cast<std::size_t>(c.K));
  // Products with the weights as they lie: one row of them for each element of dz.
  sum_products(layer.summation(order), c.N, r.dz.data(), 1, layer.weight_rows().data(), c.K, c.K, r.d.data());
  for (float& d : r.d) d = static_cast<float>(round(d));
  if (c.norm == Norm::none) return r;
  std::vector<float> squares;
  for (std::int64_t k = 0; k < c.K; ++k) r.unit.push_back(static_cast<float>(layer.x.get(m * c.K + k)));
  const float mean = c.norm == Norm::layer_norm ? sum(order, r.unit) / static_cast<float>(c.K) : 0;
  for (float& x : r.unit) {
    x -= mean;
    squares.push_back(x * x);
  }
  r.inverse = 1 / std::sqrt(sum(order, squares) / static_cast<float>(c.K) + c.norm_eps);
  for (float& x : r.unit) x *= r.inverse;
  return r;
}

LinearGradientLayer::Gradients LinearGradientLayer::plainly(Order order) const {
  const LinearCase& c = layer.given();
  Gradients out;
  ElementSums dbias(order, c.N), dnorm_weight(order, c.K), dnorm_bias(order, c.K);
  std::vector<std::vector<double>> dx(static_cast<std::size_t>(layer.rows()));
  for (std::int64_t turn = 0; turn < layer.rows(); ++turn) {
    const std::int64_t m = order == Order::backward ? layer.rows() - 1 - turn : turn;
    const PlainRow r = plain_row(m, order);
    for (std::size_t n = 0; n < r.dz.size(); ++n) dbias.add(static_cast<std::int64_t>(n), m, r.dz[n]);
    if (m % 4 == 3) {
      for (ElementSums* sums : {&dbias, &dnorm_weight, &dnorm_bias}) sums->flush();
    }
    if (c.norm == Norm::none) {
      dx[m].assign(r.d.begin(), r.d.end());
      continue;
    }
    std::vector<float> weighted, along;
    for (std::int64_t k = 0; k < c.K; ++k) {
      dnorm_weight.add(k, m, r.d[k] * r.unit[k]);
      dnorm_bias.add(k, m, r.d[k]);
      const auto weight = static_cast<float>(layer.norm_weight.given() ? layer.norm_weight.get(k) : 1.0);
      weighted.push_back(r.d[k] * weight);
      along.push_back(weighted.back() * r.unit[k]);
    }
    const auto count = static_cast<float>(c.K);
    const float mean = c.norm == Norm::layer_norm ? sum(order, weighted) / count : 0, part = sum(order, along) / count;
    for (std::int64_t k = 0; k < c.K; ++k) {
      dx[m].push_back(rounded(r.inverse * (weighted[k] - mean - r.unit[k] * part), c.dtype));
    }
  }
  for (const std::vector<double>& row : dx) out.dx.insert(out.dx.end(), row.begin(), row.end());
  const auto finish = [&c](ElementSums& sums) {
    std::vector<double> values;
    for (const float x : sums.finish()) values.push_back(rounded(x, c.dtype));
    return values;
  };
  out.dbias = finish(dbias);
  out.dnorm_weight = finish(dnorm_weight);
  out.dnorm_bias = finish(dnorm_bias);
  return out;
}

}  // namespace heddle::kit
