#include "kit/linear_gradients.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "kit/activations.h"

namespace heddle::kit {
namespace {

using Vector = std::vector<double>;
using namespace activations;

}  // namespace

void call_linear_backward(const TensorView& dy, const TensorView& x, const PackedWeights& weights,
                          const LinearGradients& gradients, const LinearOptions& options, Executor* executor) {
  Runtime runtime{{}, executor, nullptr};
  const std::size_t bytes = linear_backward_workspace(dy, x, weights, gradients, options, runtime);
  std::vector<std::byte> memory(bytes + 128, std::byte{0xFF});  // what it held before must not matter
  const auto at = (reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64;
  auto* begin = reinterpret_cast<std::byte*>(at);
  runtime.workspace = {begin, bytes};
  linear_backward(dy, x, weights, gradients, options, runtime);
  if (!std::all_of(begin + bytes, memory.data() + memory.size(), [](std::byte b) { return b == std::byte{0xFF}; })) {
    throw std::runtime_error("linear_backward wrote behind its workspace");
  }
}

LinearGradientLayer::LinearGradientLayer(const LinearCase& c)
    : layer(c), dy(HostTensor::input(c.dtype, layer.shape(), c.layout)) {
  std::mt19937 random(c.seed + 1000);
  std::normal_distribution<double> normal;
  for (std::int64_t i = 0; i < dy.elements(); ++i) dy.set(i, normal(random));
  if (c.activation == Activation::relu) leave_out_kinks();
  compute();
}

// Which side of relu's kink a sum falls on that rounding takes across is luck, and a whole dy: e would be that, and
// could not fail. There dy is 0.
void LinearGradientLayer::leave_out_kinks() {
  constexpr double kMargin = 8;
  const LinearCase& c = layer.given();
  Vector exact;
  double error = 0;
  for (std::int64_t m = 0; m < layer.rows(); ++m) {
    const Vector sums = exact_sums(layer.operands(m));
    exact.insert(exact.end(), sums.begin(), sums.end());
    for (const Order order : kOrders) {
      const Vector plain = layer.plain_sums(m, order);
      for (std::size_t n = 0; n < plain.size(); ++n) error = std::max(error, std::abs(plain[n] - sums[n]));
    }
  }
  for (std::int64_t i = 0; i < layer.rows() * c.N; ++i) {
    if (std::abs(exact[static_cast<std::size_t>(i)]) <= kMargin * error) dy.set(i, 0);
  }
}

// Before the activation.
Vector LinearGradientLayer::exact_sums(const Vector& x) const {
  const LinearCase& c = layer.given();
  Vector z;
  for (std::int64_t n = 0; n < c.N; ++n) {
    z.push_back(c.bias ? layer.bias.get(n) : 0);
    for (std::int64_t k = 0; k < c.K; ++k) z.back() += x[k] * layer.weights()[n * c.K + k];
  }
  return z;
}

// Of one row: x^ and what it is divided by, dz and d of the row with its norm.
struct LinearGradientLayer::Row {
  Vector unit, dz, d;
  double inverse = 1;
};

LinearGradientLayer::Row LinearGradientLayer::row(std::int64_t m) const {
  const LinearCase& c = layer.given();
  Row r;
  const Vector z = exact_sums(layer.operands(m));
  const bool gated = c.activation == Activation::swiglu;
  const std::int64_t outputs = gated ? c.N / 2 : c.N;
  for (std::size_t n = 0; n < z.size(); ++n) {
    const double d = dy.get(m * outputs + static_cast<std::int64_t>(gated ? n / 2 : n));
    r.dz.push_back(!gated       ? d * slope(c.activation, z[n])
                   : n % 2 == 0 ? d * z[n + 1] * silu_slope(z[n])
                                : d * silu(z[n - 1]));
  }
  for (std::int64_t k = 0; k < c.K; ++k) {
    double sum = 0;
    for (std::int64_t n = 0; n < c.N; ++n) sum += r.dz[n] * layer.weights()[n * c.K + k];
    r.d.push_back(sum);
  }
  if (c.norm == Norm::none) return r;
  double mean = 0, squares = 0;
  for (std::int64_t k = 0; k < c.K; ++k) r.unit.push_back(layer.x.get(m * c.K + k));
  const auto count = static_cast<double>(c.K);
  for (const double v : r.unit) mean += c.norm == Norm::layer_norm ? v / count : 0;
  for (const double v : r.unit) squares += (v - mean) * (v - mean);
  r.inverse = 1 / std::sqrt(squares / count + static_cast<double>(c.norm_eps));
  for (double& v : r.unit) v = (v - mean) * r.inverse;
  return r;
}

void LinearGradientLayer::compute() {
  const LinearCase& c = layer.given();
  exact_.dbias.assign(static_cast<std::size_t>(c.N), 0);
  exact_.dnorm_weight.assign(static_cast<std::size_t>(c.K), 0);
  exact_.dnorm_bias.assign(static_cast<std::size_t>(c.K), 0);
  for (std::int64_t m = 0; m < layer.rows(); ++m) {
    const Row r = row(m);
    for (std::size_t n = 0; n < r.dz.size(); ++n) exact_.dbias[n] += r.dz[n];
    if (c.norm == Norm::none) {
      exact_.dx.insert(exact_.dx.end(), r.d.begin(), r.d.end());
      continue;
    }
    const auto count = static_cast<double>(c.K);
    const auto weight = [&](std::size_t k) {
      return layer.norm_weight.given() ? layer.norm_weight.get(static_cast<std::int64_t>(k)) : 1.0;
    };
    double mean = 0, along = 0;
    for (std::size_t k = 0; k < r.d.size(); ++k) {
      exact_.dnorm_weight[k] += r.d[k] * r.unit[k];
      exact_.dnorm_bias[k] += r.d[k];
      mean += c.norm == Norm::layer_norm ? r.d[k] * weight(k) / count : 0;
      along += r.d[k] * weight(k) * r.unit[k] / count;
    }
    for (std::size_t k = 0; k < r.d.size(); ++k) {
      exact_.dx.push_back(r.inverse * (r.d[k] * weight(k) - mean - r.unit[k] * along));
    }
  }
  for (const Order order : kOrders) {
    const Gradients plain = plainly(order);
    for (const char letter : {'x', 'b', 'w', 'n'}) plain_[letter].values.push_back(of(plain, letter));
  }
}

namespace {

struct Named {
  const char* name;
  char letter;
  TensorView LinearGradients::*view;
};
constexpr Named kNamed[] = {{"dx", 'x', &LinearGradients::dx},
                            {"dbias", 'b', &LinearGradients::dbias},
                            {"dnorm_weight", 'w', &LinearGradients::dnorm_weight},
                            {"dnorm_bias", 'n', &LinearGradients::dnorm_bias}};

}  // namespace

const Vector& LinearGradientLayer::of(const Gradients& gradients, char letter) {
  switch (letter) {
    case 'x':
      return gradients.dx;
    case 'b':
      return gradients.dbias;
    case 'w':
      return gradients.dnorm_weight;
    default:
      return gradients.dnorm_bias;
  }
}

HostTensor LinearGradientLayer::output(char letter) const {
  const LinearCase& c = layer.given();
  std::vector<std::int64_t> shape = c.rows;
  shape.push_back(c.K);
  if (letter == 'x') return HostTensor::output(c.dtype, shape, c.layout);
  return HostTensor::output(c.dtype, {letter == 'b' ? c.N : c.K});
}

bool LinearGradientLayer::has(char letter) const {
  const LinearCase& c = layer.given();
  return letter == 'w' ? c.norm != Norm::none : letter != 'n' || c.norm == Norm::layer_norm;
}

Judged LinearGradientLayer::judged(char letter, const HostTensor& found) const {
  const auto* const named = std::ranges::find(kNamed, letter, &Named::letter);
  return {named->name, &found, &of(exact_, letter), &plain_.at(letter), allowed_factor(layer.given(), letter)};
}

std::string LinearGradientLayer::blind_spots(const std::string& wanted) const {
  std::string out;
  for (const char letter : wanted) {
    if (!has(letter)) continue;
    const HostTensor written = output(letter);
    const Judged tensor = judged(letter, written);
    out += kit::blind_spots({&tensor, 1});
  }
  return out;
}

Comparison LinearGradientLayer::compare(char letter, const HostTensor& found) const {
  const Judged tensor = judged(letter, found);
  Comparison result = kit::compare(tensor);
  if (const std::string damage = found.damage(); !damage.empty()) {
    result.passed = false;
    result.worst = tensor.name + "'s surroundings: " + damage;
  }
  return result;
}

std::vector<Comparison> LinearGradientLayer::run(const LinearOptions& options, const std::string& wanted, bool with_x,
                                                 Executor* executor) const {
  LinearGradients gradients;
  std::vector<std::pair<char, HostTensor>> written;
  written.reserve(std::size(kNamed));
  for (const Named& named : kNamed) {
    if (!has(named.letter) || wanted.find(named.letter) == std::string::npos) continue;
    written.emplace_back(named.letter, output(named.letter));
    gradients.*named.view = written.back().second.view();
  }
  call_linear_backward(dy.view(), with_x ? layer.x.view() : TensorView(), layer.packed.weights(), gradients, options,
                       executor);
  std::vector<Comparison> results;
  for (const auto& [letter, tensor] : written) results.push_back(compare(letter, tensor));
  return results;
}

double LinearGradientLayer::loss(std::int64_t m, const Vector& x) const {
  const LinearCase& c = layer.given();
  const auto count = static_cast<double>(c.K);
  double mean = 0, squares = 0;
  for (const double v : x) mean += c.norm == Norm::layer_norm ? v / count : 0;
  for (const double v : x) squares += (v - mean) * (v - mean);
  Vector row = x;
  for (std::size_t k = 0; c.norm != Norm::none && k < row.size(); ++k) {
    row[k] = (x[k] - mean) / std::sqrt(squares / count + static_cast<double>(c.norm_eps));
    if (layer.norm_weight.given()) row[k] *= layer.norm_weight.get(static_cast<std::int64_t>(k));
    if (layer.norm_bias.given()) row[k] += layer.norm_bias.get(static_cast<std::int64_t>(k));
  }
  const Vector z = exact_sums(row);
  const bool gated = c.activation == Activation::swiglu;
  const std::int64_t outputs = gated ? c.N / 2 : c.N;
  double total = 0;
  for (std::int64_t j = 0; j < outputs; ++j) {
    total += dy.get(m * outputs + j) * (gated ? silu(z[2 * j]) * z[2 * j + 1] : value(c.activation, z[j]));
  }
  return total;
}

}  // namespace heddle::kit
