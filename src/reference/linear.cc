#include "reference/linear.h"

#include <cmath>

#include "core/dtypes.h"

namespace heddle::reference {
namespace {

double silu(double x) { return x / (1 + std::exp(-x)); }

double activated(Activation activation, double x) {
  switch (activation) {
    case Activation::relu:
      return x < 0 ? 0 : x;
    case Activation::gelu_erf:
      return x / 2 * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::gelu_tanh:
      return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::silu:
      return silu(x);
    default:
      return x;
  }
}

// (x W^T + bias)[m, n]
double sum_of(const LinearProblem& p, std::int64_t m, std::int64_t n) {
  double sum = p.bias != nullptr ? load_element(p.bias, p.dtype, n) : 0.0;
  for (std::int64_t k = 0; k < p.K; ++k) {
    sum += static_cast<double>(load_element(p.x.row(m), p.dtype, k)) * packed_value(p.weights, n, k);
  }
  return sum;
}

std::string supports(const LinearProblem&) { return ""; }
double estimate(const LinearProblem& p, int workers) {
  return 2e-8 * static_cast<double>(p.M) * static_cast<double>(p.N) * static_cast<double>(p.K) / workers;
}
std::size_t workspace(const LinearProblem&, int) { return 0; }

void launch(const LinearProblem& p, const Runtime& runtime) {
  runtime.executor->parallel_for(p.M, [&p](std::int64_t m, int) {
    for (std::int64_t j = 0; j < p.outputs; ++j) {
      store_element(p.y.row(m), p.dtype, j, static_cast<float>(linear_output(p, m, j)));
    }
  });
}

}  // namespace

double linear_output(const LinearProblem& p, std::int64_t m, std::int64_t j) {
  const double y = p.activation == Activation::swiglu ? silu(sum_of(p, m, 2 * j)) * sum_of(p, m, 2 * j + 1)
                                                      : activated(p.activation, sum_of(p, m, j));
  return p.residual.data != nullptr ? y + load_element(p.residual.row(m), p.dtype, j) : y;
}

const LinearKernel kLinear = {
    .name = "reference",
    .method = "reference",
    .device = Device::cpu,
    .automatic = false,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
};

}  // namespace heddle::reference
