#include "kit/linear_layer.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "core/check.h"
#include "core/dtypes.h"
#include "ops/lowbit_arguments.h"
#include "reference/lowbit.h"

namespace heddle::kit {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

double activated(Activation activation, double x) {
  switch (activation) {
    case Activation::relu:
      return x < 0 ? 0 : x;
    case Activation::gelu_erf:
      return x * (1 + std::erf(x / std::sqrt(2.0))) / 2;
    case Activation::gelu_tanh:
      return x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))) / 2;
    case Activation::silu:
      return x * sigmoid(x);
    default:
      return x;
  }
}

// Of every activation, so that an error of its argument grows by no more.
constexpr double kSteepest = 1.13;

constexpr std::int64_t kRaisedColumns = 32;

void raise_scales(const LinearCase& c, const lowbit::QuantizedMatrix& matrix) {
  if (c.raised == 0 && c.all_raised == 0) return;
  const TensorView& scales = matrix.global_scale.given() ? matrix.global_scale : matrix.scales;
  const bool e8m0 = matrix.format.scale == lowbit::ScaleType::e8m0;
  if (c.raised != 0 && !e8m0) throw Error("[kit] raised is for mxfp4");
  if (!e8m0 && scales.dtype != DType::f32) throw Error("[kit] all_raised is for scales in e8m0 or f32");
  for (std::int64_t i = 0; i < scales.elements(); ++i) {
    const int by = c.all_raised + (i % scales.shape[scales.rank - 1] % 2 == 1 ? c.raised : 0);
    if (e8m0) {
      static_cast<std::uint8_t*>(scales.data)[i] += by;
    } else {
      float& scale = static_cast<float*>(scales.data)[i];
      scale = std::ldexp(scale, by);
    }
  }
}

QuantizedMemory quantized_weights(const LinearCase& c) {
  const HostTensor weights =
      draw_weights(Draw::gaussian, DType::f32, c.N, c.K, lowbit::format_named(c.format).element, c.seed);
  QuantizedMemory memory(lowbit::format_named(c.format), c.N, c.K);
  lowbit::quantize(weights.view(), {}, memory.matrix());
  if (c.more_zero != 0) {
    const TensorView& zeros = memory.matrix().zeros;
    for (std::int64_t i = 0; i < zeros.elements(); ++i) static_cast<std::uint8_t*>(zeros.data)[i] += c.more_zero;
  }
  raise_scales(c, memory.matrix());
  return memory;
}

std::vector<std::int64_t> with(std::vector<std::int64_t> rows, std::int64_t width) {
  rows.push_back(width);
  return rows;
}

void draw(HostTensor& tensor, std::mt19937& random) {
  std::normal_distribution<double> normal;
  for (std::int64_t i = 0; i < tensor.elements(); ++i) tensor.set(i, normal(random));
}

}  // namespace

void round_row(std::vector<double>& row) {
  float largest = 0;
  for (const double x : row) largest = std::max(largest, static_cast<float>(std::abs(x)));
  const float scale = largest / 127.0f;
  for (double& x : row) {
    const float quotient = scale > 0 ? static_cast<float>(x) / scale : 0.0f;
    x = std::min(127.0, std::max(-127.0, std::rint(static_cast<double>(quotient)))) * scale;
  }
}

// x as the pass in front of e4m3 products rounds it.
void round_row_to_e4m3(std::vector<double>& row) {
  constexpr float kLargest = 448.0f;
  float largest = 0;
  for (const double x : row) largest = std::max(largest, static_cast<float>(std::abs(x)));
  const float factor = largest > 0 ? kLargest / largest : 0.0f;
  for (double& x : row) {
    x = static_cast<double>(f8e4m3_to_f32(f32_to_f8e4m3(static_cast<float>(x) * factor))) * (largest / kLargest);
  }
}

PackedMemory::PackedMemory(const PackedWeights& described) : weights_(described) {
  const auto bytes = static_cast<std::size_t>(described.data.shape[0]);
  memory_.assign(bytes + 3 * kGuard, kPoison);
  auto at = reinterpret_cast<std::uintptr_t>(memory_.data()) + kGuard;
  weights_.data.data = reinterpret_cast<void*>((at + 63) / 64 * 64);
}

PackedMemory::PackedMemory(const lowbit::QuantizedMatrix& matrix, bool gated, WeightOrder order)
    : PackedMemory(packed_storage(matrix.format, matrix.rows, matrix.columns, gated, order)) {
  pack_weights(matrix, weights_);
}

bool PackedMemory::guards_intact() const {
  const auto* begin = static_cast<const std::byte*>(weights_.data.data);
  const auto poisoned = [](std::byte b) { return b == kPoison; };
  return std::all_of(memory_.data(), begin, poisoned) &&
         std::all_of(begin + weights_.data.shape[0], memory_.data() + memory_.size(), poisoned);
}

bool PackedMemory::untouched() const {
  return std::ranges::all_of(memory_, [](std::byte b) { return b == kPoison; });
}

void call_linear(const TensorView& x, const PackedWeights& weights, const TensorView& y, const LinearOptions& options,
                 Executor* executor) {
  Runtime runtime{{}, executor, nullptr};
  const std::size_t bytes = linear_forward_workspace(x, weights, options, runtime);
  std::vector<std::byte> memory(bytes + 64, std::byte{0xFF});  // what it held before must not matter
  const auto at = (reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64;
  runtime.workspace = {reinterpret_cast<void*>(at), bytes};
  linear_forward(x, weights, y, options, runtime);
}

LinearLayer::LinearLayer(const LinearCase& c)
    : x(HostTensor::input(c.dtype, with(c.rows, c.K), c.layout)),
      quantized(quantized_weights(c)),
      packed(quantized.matrix(), c.activation == Activation::swiglu, c.order),
      c_(c) {
  for (const std::int64_t extent : c.rows) M_ *= extent;
  outputs_ = c.activation == Activation::swiglu ? c.N / 2 : c.N;
  std::mt19937 random(c.seed);
  draw(x, random);
  for (std::int64_t i = 0; i < x.elements(); ++i) {
    const int lowered = (i % c.K / kRaisedColumns % 2 == 1 ? c.raised : 0) + std::clamp(c.all_raised, -13, 13);
    x.set(i, std::ldexp(x.get(i) + c.x_mean, -lowered));
  }
  if (c.norm != Norm::none && c.norm_weight) {
    norm_weight = HostTensor::input(c.dtype, {c.K});
    draw(norm_weight, random);
  }
  if (c.norm == Norm::layer_norm && c.norm_bias) {
    norm_bias = HostTensor::input(c.dtype, {c.K});
    draw(norm_bias, random);
  }
  if (c.bias) {
    bias = HostTensor::input(c.dtype, {c.N});
    draw(bias, random);
  }
  if (c.residual) {
    residual =
        c.in_place ? HostTensor::output(c.dtype, shape(), c.layout) : HostTensor::input(c.dtype, shape(), c.layout);
    draw(residual, random);
  }
  compute();
}

std::vector<std::int64_t> LinearLayer::shape() const { return with(c_.rows, outputs_); }

LinearOptions LinearLayer::options() const {
  LinearOptions options;
  options.activation = c_.activation;
  options.int8_x = c_.int8_x;
  if (c_.bias) options.bias = bias.view();
  if (c_.residual) options.residual = residual.view();
  options.norm = c_.norm;
  options.norm_eps = c_.norm_eps;
  options.norm_weight = norm_weight.view();
  options.norm_bias = norm_bias.view();
  return options;
}

HostTensor LinearLayer::output() const {
  return c_.in_place ? residual : HostTensor::output(c_.dtype, shape(), c_.layout);
}

std::vector<double> LinearLayer::normed(std::int64_t m, bool plain) const {
  std::vector<double> row(static_cast<std::size_t>(c_.K));
  for (std::int64_t k = 0; k < c_.K; ++k) row[static_cast<std::size_t>(k)] = x.get(m * c_.K + k);
  if (c_.norm == Norm::none) return row;
  const auto narrow = [plain](double value) { return plain ? static_cast<double>(static_cast<float>(value)) : value; };
  double sum = 0, squares = 0;
  for (const double v : row) sum = narrow(sum + v);
  const double mean = c_.norm == Norm::layer_norm ? narrow(sum / static_cast<double>(c_.K)) : 0;
  for (double& v : row) {
    v = narrow(v - mean);
    squares = narrow(squares + v * v);
  }
  const double inverse = narrow(1 / std::sqrt(squares / static_cast<double>(c_.K) + c_.norm_eps));
  for (std::int64_t k = 0; k < c_.K; ++k) {
    double& v = row[static_cast<std::size_t>(k)];
    v = narrow(v * inverse);
    if (norm_weight.given()) v = narrow(v * norm_weight.get(k));
    if (norm_bias.given()) v = narrow(v + norm_bias.get(k));
    if (plain) v = rounded(v, c_.dtype);
  }
  return row;
}

// In double on the stored weights; and plainly: normalised rows, weights, sums, activations and the sum with the
// residual each rounded to x's dtype, sums of products in f32.
void LinearLayer::compute() {
  const auto round = [this](double value) { return rounded(value, c_.dtype); };
  if (c_.order == WeightOrder::fragments8) {  // which rounds nvfp4
    const HostTensor unpacked = HostTensor::output(DType::f32, {c_.N, c_.K});
    unpack_weights(packed.weights(), unpacked.view());
    weights_ = unpacked.values();
  } else {
    const lowbit::Matrix matrix = lowbit::checked_matrix(Check("test"), quantized.matrix(), "matrix");
    weights_.resize(static_cast<std::size_t>(c_.N * c_.K));
    for (std::int64_t i = 0; i < c_.N * c_.K; ++i) {
      weights_[static_cast<std::size_t>(i)] = reference::dequantized(matrix, i / c_.K, i % c_.K);
    }
  }
  struct Sum {
    double exact, plain, terms;
  };
  std::vector<double> row, plain_row;
  const auto sum = [&](std::int64_t n) {
    Sum s{0, 0, 0};
    float plain = 0;
    for (std::int64_t k = 0; k < c_.K; ++k) {
      const double w = weights_[static_cast<std::size_t>(n * c_.K + k)], v = row[static_cast<std::size_t>(k)];
      s.exact += v * w;
      s.terms += std::abs(v * w);
      plain += static_cast<float>(plain_row[static_cast<std::size_t>(k)]) * static_cast<float>(round(w));
    }
    const double b = c_.bias ? bias.get(n) : 0;
    return Sum{s.exact + b, round(plain + static_cast<float>(b)), s.terms + std::abs(b)};
  };
  for (std::int64_t m = 0; m < M_; ++m) {
    row = normed(m, false);
    plain_row = normed(m, true);
    if (c_.int8_x) {
      round_row(row);
      round_row(plain_row);
    }
    if (c_.order == WeightOrder::fragments8 || c_.order == WeightOrder::matrix8) {
      round_row_to_e4m3(row);
      round_row_to_e4m3(plain_row);
    }
    for (std::int64_t j = 0; j < outputs_; ++j) {
      Sum y;
      if (c_.activation == Activation::swiglu) {
        const Sum gate = sum(2 * j), up = sum(2 * j + 1);
        const double silu = activated(Activation::silu, gate.exact);
        y.exact = silu * up.exact;
        y.plain = round(static_cast<float>(round(activated(Activation::silu, gate.plain))) * up.plain);
        y.terms = kSteepest * gate.terms * std::abs(up.exact) + std::abs(silu) * up.terms;
      } else {
        const Sum s = sum(j);
        y = {activated(c_.activation, s.exact), round(activated(c_.activation, s.plain)), kSteepest * s.terms};
      }
      if (c_.residual) {
        const double r = residual.get(m * outputs_ + j);
        y = {y.exact + r, round(static_cast<float>(y.plain) + static_cast<float>(r)), y.terms + std::abs(r)};
      }
      reference_.push_back(y.exact);
      plain_.values.push_back(y.plain);
      plain_.terms = std::max(plain_.terms, y.terms);
    }
  }
}

Comparison LinearLayer::run(const LinearOptions& given) const {
  const HostTensor y = output();
  LinearOptions options = given;
  if (c_.in_place) options.residual = y.view();
  call_linear(x.view(), packed.weights(), y.view(), options);
  return compare(y);
}

Comparison LinearLayer::compare(const HostTensor& y) const {
  // Weights of mxfp4 have 2 bits as operands, and the tensor cores' sums then lose next to nothing.
  const bool e4m3_products = c_.order == WeightOrder::fragments8 && c_.format == "nvfp4";
  const DType operands = e4m3_products ? DType::f8e4m3 : c_.dtype;
  Comparison result = kit::compare("y", y.values(), reference_, plain_, shape(), c_.dtype, operands, kFactor);
  if (const std::string damage = y.damage(); !damage.empty()) {
    result.passed = false;
    result.worst = "y's surroundings: " + damage;
  }
  return result;
}

}  // namespace heddle::kit
