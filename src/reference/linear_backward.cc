#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/dtypes.h"
#include "reference/linear.h"

namespace heddle::reference {
namespace {

using Row = std::vector<double>;

double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

// Beyond 10^3 no derivative changes any more; at infinity the formulas would give NaN for it.
double within(double z) { return std::isnan(z) ? z : std::clamp(z, -1e3, 1e3); }

double silu_slope(double z) {
  const double s = sigmoid(within(z));
  return s * (1 + within(z) * (1 - s));
}

// activation'(z)
double slope(Activation activation, double given) {
  const double z = within(given);
  switch (activation) {
    case Activation::relu:
      return z <= 0 ? 0 : 1;
    case Activation::gelu_erf:
      return (1 + std::erf(z / std::sqrt(2.0))) / 2 + z * std::exp(-z * z / 2) / std::sqrt(2 * M_PI);
    case Activation::gelu_tanh: {
      const double factor = std::sqrt(2 / M_PI), t = std::tanh(factor * (z + 0.044715 * z * z * z));
      return (1 + t) / 2 + z / 2 * (1 - t * t) * factor * (1 + 3 * 0.044715 * z * z);
    }
    case Activation::silu:
      return silu_slope(z);
    default:
      return 1;
  }
}

// Of row m with respect to its sums, [N].
Row gradient_of_sums(const LinearBackwardProblem& p, std::int64_t m) {
  const LinearProblem& f = p.forward;
  const auto dy = [&](std::int64_t j) -> double { return load_element(p.dy.row(m), f.dtype, j); };
  Row dz(static_cast<std::size_t>(f.N));
  const Row x = p.activated() ? row_of(f, m) : Row();
  for (std::int64_t n = 0; n < f.N; ++n) {
    double& d = dz[static_cast<std::size_t>(n)];
    if (f.activation == Activation::none) {
      d = dy(n);
    } else if (f.activation != Activation::swiglu) {
      d = dy(n) * slope(f.activation, sum_of(f, x, n));
    } else if (n % 2 == 0) {
      d = dy(n / 2) * sum_of(f, x, n + 1) * silu_slope(sum_of(f, x, n));
    } else {
      const double gate = sum_of(f, x, n - 1);
      d = dy(n / 2) * gate * sigmoid(gate);
    }
  }
  return dz;
}

// Of the row with its norm, [K].
Row gradient_of_rows(const LinearProblem& p, const Row& dz) {
  Row d(static_cast<std::size_t>(p.K));
  for (std::int64_t k = 0; k < p.K; ++k) {
    for (std::int64_t n = 0; n < p.N; ++n) {
      d[static_cast<std::size_t>(k)] += dz[static_cast<std::size_t>(n)] * packed_value(p.panels(), n, k);
    }
  }
  return d;
}

// Of x, from that of its norm: with h = d * weight, inverse * (h - mean(h) - x^ mean(h x^)), without mean(h) for
// rms_norm.
Row through_norm(const LinearProblem& p, const NormedRow& row, Row d) {
  for (std::int64_t k = 0; p.norm.weight != nullptr && k < p.K; ++k) {
    d[static_cast<std::size_t>(k)] *= load_element(p.norm.weight, p.dtype, k);
  }
  const auto count = static_cast<double>(p.K);
  const double mean = p.norm.kind == Norm::layer_norm ? std::accumulate(d.begin(), d.end(), 0.0) / count : 0.0;
  const double along = std::inner_product(d.begin(), d.end(), row.unit.begin(), 0.0) / count;
  for (std::size_t k = 0; k < d.size(); ++k) d[k] = row.inverse * (d[k] - mean - row.unit[k] * along);
  return d;
}

void store(const Row& row, std::byte* to, DType dtype) {
  for (std::size_t i = 0; to != nullptr && i < row.size(); ++i) {
    store_element(to, dtype, static_cast<std::int64_t>(i), static_cast<float>(row[i]));
  }
}

std::string supports(const LinearBackwardProblem&) { return ""; }
double estimate(const LinearBackwardProblem& p, int) {
  const LinearProblem& f = p.forward;
  return 4e-8 * static_cast<double>(f.M) * static_cast<double>(f.N) * static_cast<double>(f.K);
}
std::size_t workspace(const LinearBackwardProblem&, int) { return 0; }

std::string describe(const LinearBackwardProblem&, int) { return "each sum in doubles"; }

void launch(const LinearBackwardProblem& p, const Runtime&) {
  const LinearProblem& f = p.forward;
  Row dbias(static_cast<std::size_t>(f.N)), dnorm_weight(static_cast<std::size_t>(f.K)), dnorm_bias = dnorm_weight;
  for (std::int64_t m = 0; m < f.M; ++m) {
    const Row dz = gradient_of_sums(p, m);
    for (std::size_t n = 0; n < dz.size(); ++n) dbias[n] += dz[n];
    if (!p.wants_rows()) continue;
    Row d = gradient_of_rows(f, dz);
    if (p.normed()) {
      const NormedRow row = normed_row(f, m);
      for (std::size_t k = 0; k < d.size(); ++k) {
        dnorm_weight[k] += d[k] * row.unit[k];
        dnorm_bias[k] += d[k];
      }
      d = through_norm(f, row, std::move(d));
    }
    if (p.dx.data != nullptr) store(d, p.dx.row(m), f.dtype);
  }
  store(dbias, p.dbias, f.dtype);
  store(dnorm_weight, p.dnorm_weight, f.dtype);
  store(dnorm_bias, p.dnorm_bias, f.dtype);
}

}  // namespace

const LinearBackwardKernel kLinearBackward = {
    .name = "reference",
    .method = "reference",
    .device = Device::cpu,
    .automatic = false,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe,
    .extras = kNormInFront,
};

}  // namespace heddle::reference
