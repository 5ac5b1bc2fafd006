#include "kit/linear_gradients.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace heddle::kit {
namespace {

using Vector = std::vector<double>;

double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }
double silu(double z) { return z * sigmoid(z); }
double silu_slope(double z) { return sigmoid(z) + z * sigmoid(z) * sigmoid(-z); }
double normal_density(double z) { return std::exp(-z * z / 2) / std::sqrt(2 * M_PI); }
double normal_cumulative(double z) { return std::erfc(-z / std::sqrt(2.0)) / 2; }

double value(Activation activation, double z) {
  switch (activation) {
    case Activation::relu:
      return std::max(z, 0.0);
    case Activation::gelu_erf:
      return z * normal_cumulative(z);
    case Activation::gelu_tanh:
      return z * sigmoid(2 * std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z));
    case Activation::silu:
      return silu(z);
    default:
      return z;
  }
}

double slope(Activation activation, double z) {
  switch (activation) {
    case Activation::relu:
      return z > 0;
    case Activation::gelu_erf:
      return normal_cumulative(z) + z * normal_density(z);
    case Activation::gelu_tanh: {  // z s(u(z)): s + z s (1 - s) u'
      const double s = sigmoid(2 * std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z));
      return s + z * s * (1 - s) * 2 * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * z * z);
    }
    case Activation::silu:
      return silu_slope(z);
    default:
      return 1;
  }
}

// Of every slope, and of the slopes' own.
constexpr double kSteepest = 1.13, kCurved = 0.8;

float narrow(double x) { return static_cast<float>(x); }

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
  compute();
}

// Of one row: x^ and what it is divided by, dz and d of the row with its norm; exact, plain, and sums of |terms|.
struct LinearGradientLayer::Row {
  Vector unit, plain_unit, dz, plain_dz, dz_terms, d, plain_d, d_terms;
  double inverse = 1;
};

void LinearGradientLayer::sums(const LinearCase& c, Row& r, std::int64_t m) const {
  Vector x = layer.normed(m, false), plain_x = layer.normed(m, true);
  if (c.int8_x) {
    round_row(x);
    round_row(plain_x);
  }
  Vector z, plain_z, terms;
  for (std::int64_t n = 0; n < c.N; ++n) {
    const double b = c.bias ? layer.bias.get(n) : 0;
    double exact = b, absolute = std::abs(b);
    float plain = 0;
    for (std::size_t k = 0; k < x.size(); ++k) {
      const double w = layer.weights()[static_cast<std::size_t>(n * c.K) + k];
      exact += x[k] * w;
      absolute += std::abs(x[k] * w);
      plain += narrow(plain_x[k]) * narrow(rounded(w, c.dtype));
    }
    z.push_back(exact);
    plain_z.push_back(rounded(plain + narrow(b), c.dtype));
    terms.push_back(absolute);
  }
  const bool gated = c.activation == Activation::swiglu;
  const std::int64_t outputs = gated ? c.N / 2 : c.N;
  for (std::size_t n = 0; n < z.size(); ++n) {
    const double d = dy.get(m * outputs + static_cast<std::int64_t>(gated ? n / 2 : n));
    if (!gated) {
      r.dz.push_back(d * slope(c.activation, z[n]));
      r.plain_dz.push_back(rounded(narrow(d) * narrow(slope(c.activation, plain_z[n])), c.dtype));
      const bool straight = c.activation == Activation::none || c.activation == Activation::relu;
      r.dz_terms.push_back(std::abs(d) * (kSteepest + (straight ? 0 : kCurved * terms[n])));
    } else if (n % 2 == 0) {
      r.dz.push_back(d * z[n + 1] * silu_slope(z[n]));
      r.plain_dz.push_back(rounded(d * plain_z[n + 1] * silu_slope(plain_z[n]), c.dtype));
      r.dz_terms.push_back(std::abs(d) * (kSteepest * terms[n + 1] + kCurved * terms[n] * std::abs(z[n + 1])));
    } else {
      r.dz.push_back(d * silu(z[n - 1]));
      r.plain_dz.push_back(rounded(d * rounded(silu(plain_z[n - 1]), c.dtype), c.dtype));
      r.dz_terms.push_back(std::abs(d) * kSteepest * terms[n - 1]);
    }
  }
}

LinearGradientLayer::Row LinearGradientLayer::row(std::int64_t m) const {
  const LinearCase& c = layer.given();
  Row r;
  sums(c, r, m);
  for (std::int64_t k = 0; k < c.K; ++k) {
    double exact = 0, absolute = 0;
    float plain = 0;
    for (std::int64_t n = 0; n < c.N; ++n) {
      const auto at = static_cast<std::size_t>(n);
      const double w = layer.weights()[static_cast<std::size_t>(n * c.K + k)];
      exact += r.dz[at] * w;
      absolute += r.dz_terms[at] * std::abs(w);
      plain += narrow(r.plain_dz[at]) * narrow(rounded(w, c.dtype));
    }
    r.d.push_back(exact);
    r.d_terms.push_back(absolute);
    r.plain_d.push_back(rounded(plain, c.dtype));
  }
  if (c.norm == Norm::none) return r;
  double mean = 0, squares = 0;
  for (std::int64_t k = 0; k < c.K; ++k) r.unit.push_back(layer.x.get(m * c.K + k));
  const auto count = static_cast<double>(c.K);
  for (const double x : r.unit) mean += c.norm == Norm::layer_norm ? x / count : 0;
  for (const double x : r.unit) squares += (x - mean) * (x - mean);
  r.inverse = 1 / std::sqrt(squares / count + static_cast<double>(c.norm_eps));
  for (double& x : r.unit) {
    r.plain_unit.push_back(narrow(x - narrow(mean)) * narrow(r.inverse));
    x = (x - mean) * r.inverse;
  }
  return r;
}

void LinearGradientLayer::compute() {
  const LinearCase& c = layer.given();
  for (Gradients* g : {&exact_, &plain_, &terms_}) {
    g->dbias.assign(static_cast<std::size_t>(c.N), 0);
    g->dnorm_weight.assign(static_cast<std::size_t>(c.K), 0);
    g->dnorm_bias.assign(static_cast<std::size_t>(c.K), 0);
  }
  for (std::int64_t m = 0; m < layer.rows(); ++m) {
    const Row r = row(m);
    for (std::size_t n = 0; n < r.dz.size(); ++n) {
      exact_.dbias[n] += r.dz[n];
      plain_.dbias[n] = narrow(plain_.dbias[n] + r.plain_dz[n]);
      terms_.dbias[n] += r.dz_terms[n];
    }
    if (c.norm == Norm::none) {
      exact_.dx.insert(exact_.dx.end(), r.d.begin(), r.d.end());
      plain_.dx.insert(plain_.dx.end(), r.plain_d.begin(), r.plain_d.end());
      terms_.dx.insert(terms_.dx.end(), r.d_terms.begin(), r.d_terms.end());
      continue;
    }
    const auto count = static_cast<double>(c.K);
    double h_mean = 0, along = 0, plain_mean = 0, plain_along = 0, mean_terms = 0, along_terms = 0;
    const auto weight = [&](std::size_t k) {
      return layer.norm_weight.given() ? layer.norm_weight.get(static_cast<std::int64_t>(k)) : 1.0;
    };
    for (std::size_t k = 0; k < r.d.size(); ++k) {
      exact_.dnorm_weight[k] += r.d[k] * r.unit[k];
      plain_.dnorm_weight[k] = narrow(plain_.dnorm_weight[k] + narrow(r.plain_d[k]) * narrow(r.plain_unit[k]));
      terms_.dnorm_weight[k] += r.d_terms[k] * std::abs(r.unit[k]);
      exact_.dnorm_bias[k] += r.d[k];
      plain_.dnorm_bias[k] = narrow(plain_.dnorm_bias[k] + r.plain_d[k]);
      terms_.dnorm_bias[k] += r.d_terms[k];
      const bool centred = c.norm == Norm::layer_norm;
      h_mean += centred ? r.d[k] * weight(k) / count : 0;
      plain_mean += centred ? r.plain_d[k] * weight(k) / count : 0;
      mean_terms += centred ? r.d_terms[k] * std::abs(weight(k)) / count : 0;
      along += r.d[k] * weight(k) * r.unit[k] / count;
      plain_along += r.plain_d[k] * weight(k) * r.plain_unit[k] / count;
      along_terms += r.d_terms[k] * std::abs(weight(k) * r.unit[k]) / count;
    }
    for (std::size_t k = 0; k < r.d.size(); ++k) {
      exact_.dx.push_back(r.inverse * (r.d[k] * weight(k) - h_mean - r.unit[k] * along));
      plain_.dx.push_back(narrow(narrow(r.inverse) * narrow(narrow(r.plain_d[k] * weight(k)) - narrow(plain_mean) -
                                                            narrow(r.plain_unit[k] * narrow(plain_along)))));
      terms_.dx.push_back(r.inverse *
                          (r.d_terms[k] * std::abs(weight(k)) + mean_terms + std::abs(r.unit[k]) * along_terms));
    }
  }
  for (Vector* plain : {&plain_.dx, &plain_.dbias, &plain_.dnorm_weight, &plain_.dnorm_bias}) {
    for (double& x : *plain) x = rounded(x, c.dtype);
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

Comparison LinearGradientLayer::compare(char letter, const HostTensor& found) const {
  const LinearCase& c = layer.given();
  std::string name;
  for (const Named& named : kNamed) {
    if (named.letter == letter) name = named.name;
  }
  PlainTensor plain;
  plain.values = of(plain_, letter);
  for (const double t : of(terms_, letter)) plain.terms = std::max(plain.terms, t);
  std::vector<std::int64_t> extent = c.rows;
  extent.push_back(c.K);
  if (letter != 'x') extent = {found.elements()};
  Comparison result = kit::compare(name, found.values(), of(exact_, letter), plain, extent, c.dtype, c.dtype, kFactor);
  if (const std::string damage = found.damage(); !damage.empty()) {
    result.passed = false;
    result.worst = name + "'s surroundings: " + damage;
  }
  return result;
}

std::vector<Comparison> LinearGradientLayer::run(const LinearOptions& options, const std::string& wanted, bool with_x,
                                                 Executor* executor) const {
  const LinearCase& c = layer.given();
  const auto asked = [&](char letter) {
    if (letter == 'w' && c.norm == Norm::none) return false;
    if (letter == 'n' && c.norm != Norm::layer_norm) return false;
    return wanted.find(letter) != std::string::npos;
  };
  LinearGradients gradients;
  std::vector<std::pair<char, HostTensor>> written;
  written.reserve(std::size(kNamed));
  for (const Named& named : kNamed) {
    if (!asked(named.letter)) continue;
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
  const auto z = [&](std::int64_t n) {
    double sum = c.bias ? layer.bias.get(n) : 0;
    for (std::size_t k = 0; k < row.size(); ++k) sum += row[k] * layer.weights()[static_cast<std::size_t>(n * c.K) + k];
    return sum;
  };
  const bool gated = c.activation == Activation::swiglu;
  const std::int64_t outputs = gated ? c.N / 2 : c.N;
  double total = 0;
  for (std::int64_t j = 0; j < outputs; ++j) {
    total += dy.get(m * outputs + j) * (gated ? silu(z(2 * j)) * z(2 * j + 1) : value(c.activation, z(j)));
  }
  return total;
}

}  // namespace heddle::kit
