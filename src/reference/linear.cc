#include "reference/linear.h"

#include <cmath>
#include <vector>

#include "core/dtypes.h"
#include "core/parallel.h"
#include "lowbit/int8_rows.h"

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

// y[m, j] before it is rounded; x is row m.
double output(const LinearProblem& p, const std::vector<double>& x, std::int64_t m, std::int64_t j) {
  const double y = p.activation == Activation::swiglu ? silu(sum_of(p, x, 2 * j)) * sum_of(p, x, 2 * j + 1)
                                                      : activated(p.activation, sum_of(p, x, j));
  return p.residual.data != nullptr ? y + load_element(p.residual.row(m), p.dtype, j) : y;
}

std::string supports(const LinearProblem&) { return ""; }
double estimate(const LinearProblem& p, int workers) {
  return 2e-8 * static_cast<double>(p.M) * static_cast<double>(p.N) * static_cast<double>(p.K) / workers;
}
std::size_t workspace(const LinearProblem&, int) { return 0; }

std::string describe(const LinearProblem&, int) { return "each sum in doubles"; }

void launch(const LinearProblem& p, const Runtime& runtime) {
  parallel_for(*runtime.executor, p.M, [&p](std::int64_t m, int) {
    const std::vector<double> x = row_of(p, m);
    for (std::int64_t j = 0; j < p.outputs; ++j) {
      store_element(p.y.row(m), p.dtype, j, static_cast<float>(output(p, x, m, j)));
    }
  });
}

}  // namespace

NormedRow normed_row(const LinearProblem& p, std::int64_t m) {
  NormedRow row;
  row.unit.resize(static_cast<std::size_t>(p.K));
  for (std::int64_t k = 0; k < p.K; ++k) row.unit[static_cast<std::size_t>(k)] = load_element(p.x.row(m), p.dtype, k);
  row.values = row.unit;
  if (p.norm.kind == Norm::none) return row;
  const auto count = static_cast<double>(p.K);
  double mean = 0, squares = 0;
  if (p.norm.kind == Norm::layer_norm) {
    for (const double value : row.unit) mean += value / count;
  }
  for (const double value : row.unit) squares += (value - mean) * (value - mean);
  row.inverse = 1 / std::sqrt(squares / count + p.norm.eps);
  for (std::int64_t k = 0; k < p.K; ++k) {
    const double unit = row.unit[static_cast<std::size_t>(k)] =
        (row.values[static_cast<std::size_t>(k)] - mean) * row.inverse;
    const double weight = p.norm.weight != nullptr ? load_element(p.norm.weight, p.dtype, k) : 1.0;
    const double bias = p.norm.bias != nullptr ? load_element(p.norm.bias, p.dtype, k) : 0.0;
    row.values[static_cast<std::size_t>(k)] = unit * weight + bias;
  }
  return row;
}

std::vector<double> row_of(const LinearProblem& p, std::int64_t m) {
  const std::vector<double> normed = normed_row(p, m).values;
  if (!p.int8_x) return normed;
  const std::vector<float> x(normed.begin(), normed.end());
  std::vector<std::int8_t> q(x.size());
  const double scale = round_to_int8(x.data(), p.K, q.data());
  std::vector<double> row(q.begin(), q.end());
  for (double& value : row) value *= scale;
  return row;
}

double sum_of(const LinearProblem& p, const std::vector<double>& x, std::int64_t n) {
  double sum = p.bias != nullptr ? load_element(p.bias, p.dtype, n) : 0.0;
  for (std::int64_t k = 0; k < p.K; ++k) sum += x[static_cast<std::size_t>(k)] * packed_value(p.panels(), n, k);
  return sum;
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
    .describe = describe,
    .extras = kNormInFront,
};

}  // namespace heddle::reference
