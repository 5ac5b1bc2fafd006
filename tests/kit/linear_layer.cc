#include "kit/linear_layer.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "core/check.h"
#include "kit/activations.h"
#include "kit/linear_operands.h"
#include "ops/lowbit/arguments.h"
#include "reference/lowbit.h"

namespace heddle::kit {
namespace {

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

double allowed_factor(const LinearCase& c, char tensor) {
  if (tensor == 'b') return factor_of(c.N);
  if (tensor == 'w' || tensor == 'n') return factor_of(c.K);
  std::int64_t rows = 1;
  for (const std::int64_t extent : c.rows) rows *= extent;
  if (tensor == 'x') return factor_of(rows * c.K);
  return factor_of(rows * (c.activation == Activation::swiglu ? c.N / 2 : c.N));
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
  read_weights();
  compute();
  for (const Order order : kOrders) plain_.values.push_back(plainly(order));
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

std::vector<double> LinearLayer::operands(std::int64_t m) const {
  std::vector<double> row(static_cast<std::size_t>(c_.K));
  for (std::int64_t k = 0; k < c_.K; ++k) row[k] = x.get(m * c_.K + k);
  if (c_.norm != Norm::none) {
    double mean = 0, squares = 0;
    for (const double v : row) mean += c_.norm == Norm::layer_norm ? v / static_cast<double>(c_.K) : 0;
    for (double& v : row) {
      v -= mean;
      squares += v * v;
    }
    const double inverse = 1 / std::sqrt(squares / static_cast<double>(c_.K) + c_.norm_eps);
    for (std::int64_t k = 0; k < c_.K; ++k) {
      row[k] *= inverse * (norm_weight.given() ? norm_weight.get(k) : 1);
      row[k] += norm_bias.given() ? norm_bias.get(k) : 0;
    }
  }
  round_operands(c_, row);
  return row;
}

void LinearLayer::read_weights() {
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
  weight_columns_.resize(weights_.size());
  for (std::int64_t i = 0; i < c_.N * c_.K; ++i) {
    weight_rows_.push_back(static_cast<float>(rounded(weights_[i], c_.dtype)));
    weight_columns_[i % c_.K * c_.N + i / c_.K] = weight_rows_.back();
  }
}

// In double on the stored weights.
void LinearLayer::compute() {
  struct Sum {
    double exact, terms;
  };
  std::vector<double> row;
  const auto sum = [&](std::int64_t n) {
    Sum s{0, 0};
    for (std::int64_t k = 0; k < c_.K; ++k) {
      const double w = weights_[static_cast<std::size_t>(n * c_.K + k)], v = row[static_cast<std::size_t>(k)];
      s.exact += v * w;
      s.terms += std::abs(v * w);
    }
    const double b = c_.bias ? bias.get(n) : 0;
    return Sum{s.exact + b, s.terms + std::abs(b)};
  };
  for (std::int64_t m = 0; m < M_; ++m) {
    row = operands(m);
    for (std::int64_t j = 0; j < outputs_; ++j) {
      Sum y;
      if (c_.activation == Activation::swiglu) {
        const Sum gate = sum(2 * j), up = sum(2 * j + 1);
        const double silu = activations::value(Activation::silu, gate.exact);
        y.exact = silu * up.exact;
        y.terms = kSteepest * gate.terms * std::abs(up.exact) + std::abs(silu) * up.terms;
      } else {
        const Sum s = sum(j);
        y = {activations::value(c_.activation, s.exact), kSteepest * s.terms};
      }
      if (c_.residual) {
        const double r = residual.get(m * outputs_ + j);
        y = {y.exact + r, y.terms + std::abs(r)};
      }
      reference_.push_back(y.exact);
      terms_ = std::max(terms_, y.terms);
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

Judged LinearLayer::judged(const HostTensor& y) const {
  return {"y", &y, &reference_, &plain_, allowed_factor(c_, 'y')};
}

std::string LinearLayer::blind_spots() const {
  const HostTensor y = output();
  const Judged tensor = judged(y);
  return kit::blind_spots({&tensor, 1});
}

Comparison LinearLayer::compare(const HostTensor& y) const {
  Comparison result = kit::compare(judged(y));
  if (const std::string damage = y.damage(); !damage.empty()) {
    result.passed = false;
    result.worst = "y's surroundings: " + damage;
  }
  return result;
}

}  // namespace heddle::kit
