#include "model/transformer_linear.h"

#include <algorithm>
#include <cstring>

#include "core/dtypes.h"
#include "cpu/kernels.h"
#include "cpu/row_ops.h"
#include "model/places.h"

namespace heddle {
namespace {

// Tasks one after the other on the calling thread: callers hand out rows themselves.
class Inline : public Executor {
 public:
  int workers() const override { return 1; }
  void parallel_for(std::int64_t count, const std::function<void(std::int64_t, int)>& task) override {
    for (std::int64_t i = 0; i < count; ++i) task(i, 0);
  }
};

Runtime inline_runtime(Workspace workspace = {}) {
  static Inline executor;
  Runtime runtime;
  runtime.workspace = workspace;
  runtime.executor = &executor;
  return runtime;
}

// f32 and bf16 to each other.
void convert(const std::byte* from, DType dtype, std::int64_t count, std::byte* to) {
  if (dtype == DType::f32) {
    narrow(reinterpret_cast<const float*>(from), count, reinterpret_cast<std::uint16_t*>(to));
  } else {
    widen(reinterpret_cast<const std::uint16_t*>(from), count, reinterpret_cast<float*>(to));
  }
}

std::size_t bytes_of(const TensorView& view) { return static_cast<std::size_t>(view.elements()) * size_of(view.dtype); }

}  // namespace

TransformerLinear::TransformerLinear(const Shape& shape, const float* weight, const float* bias, DType precision,
                                     const cpu::NormParameters& norm)
    : shape_(shape), format_(name_of(precision)), precision_(precision) {
  if (shape.device == Device::cuda) {
    packed_data_ = WeightMemory(weight, static_cast<std::size_t>(shape.out * shape.in), precision, shape.device);
    TensorView held(packed_data_.data(), precision, {shape.out, shape.in});
    held.device = shape.device;
    packed_ = dense_weights(held, shape.activation == Activation::swiglu);
    hold(bias);
    hold(norm, shape.dtype);
    return;
  }
  library_y_ = shape.role == LinearRole::project && precision == shape.dtype ? shape.dtype : DType::f32;
  const std::vector<float> zeros(bias == nullptr ? static_cast<std::size_t>(shape.out) : 0);
  library_ = std::make_unique<FloatLinear>(weight, bias == nullptr ? zeros.data() : bias, shape.out, shape.in,
                                           precision, library_y_);
  hold(norm, DType::f32);
  if (precision != shape.dtype || norm_ != Norm::none)
    y_at_ = aligned(size_of(precision) * static_cast<std::size_t>(kLinearRows * shape.in));
  library_at_ = y_at_;
  if (shape.role == LinearRole::project) {
    library_at_ += aligned(size_of(library_y_) * static_cast<std::size_t>(kLinearRows * shape.out));
  }
  library_bytes_ = aligned(library_->scratch_bytes());
}

TransformerLinear::TransformerLinear(const Shape& shape, const lowbit::QuantizedMatrix& weight, const float* bias,
                                     const cpu::NormParameters& norm)
    : shape_(shape), format_(lowbit::name_of(weight.format)) {
  const bool gpu = shape.device == Device::cuda;
  const bool gated = shape.activation == Activation::swiglu;
  const WeightOrder order =
      packed_order_for(weight.format, weight.rows, weight.columns, {.device = shape.device, .gated = gated}).order;
  packed_ = packed_storage(weight.format, weight.rows, weight.columns, gated, order);
  packed_data_ = WeightMemory(bytes_of(packed_.data));
  packed_.data.data = packed_data_.data();
  packing_error_ = pack_weights(weight, packed_);
  hold(bias);
  hold(norm, shape.dtype);
  if (gpu) {
    packed_data_.move_to(shape.device);
    packed_.data.data = packed_data_.data();
    packed_.device = packed_.data.device = shape.device;
    return;
  }
  if (shape.role == LinearRole::sum && shape.dtype != DType::f32) {
    library_at_ = aligned(size_of(shape.dtype) * static_cast<std::size_t>(kLinearRows * shape.out));
  }
  const TensorView x(nullptr, shape.dtype, {kLinearRows, shape.in});
  const LinearOptions options = packed_options();
  library_bytes_ = aligned(linear_forward_workspace(x, packed_, options, inline_runtime()));
}

void TransformerLinear::hold(const float* bias) {
  if (bias == nullptr) return;
  bias_ = WeightMemory(bias, static_cast<std::size_t>(shape_.out), shape_.dtype, shape_.device);
}

void TransformerLinear::hold(const cpu::NormParameters& norm, DType dtype) {
  norm_ = norm.kind;
  norm_eps_ = norm.eps;
  const auto held = [&](const float* values) {
    return values == nullptr ? WeightMemory()
                             : WeightMemory(values, static_cast<std::size_t>(shape_.in), dtype, shape_.device);
  };
  norm_weight_ = held(norm.weight);
  norm_bias_ = held(norm.bias);
}

cpu::NormParameters TransformerLinear::library_norm() const {
  return {norm_, norm_eps_, reinterpret_cast<const float*>(norm_weight_.data()),
          reinterpret_cast<const float*>(norm_bias_.data())};
}

LinearOptions TransformerLinear::packed_options() const {
  LinearOptions options;
  options.activation = shape_.activation;
  const auto vector = [&](const WeightMemory& held, std::int64_t size) {
    TensorView view;
    if (held.size() > 0) view = TensorView(held.data(), shape_.dtype, {size});
    view.device = shape_.device;
    return view;
  };
  options.bias = vector(bias_, shape_.out);
  options.norm = norm_;
  options.norm_eps = static_cast<float>(norm_eps_);
  options.norm_weight = vector(norm_weight_, shape_.in);
  options.norm_bias = vector(norm_bias_, shape_.in);
  return options;
}

std::size_t TransformerLinear::weight_bytes() const {
  const std::size_t norm = norm_weight_.size() + norm_bias_.size();
  return norm + (library_ != nullptr ? library_->weight_bytes() : packed_data_.size() + bias_.size());
}

void TransformerLinear::run(const std::byte* x, const std::byte* residual, std::byte* y, std::int64_t y_stride,
                            std::int64_t rows, std::byte* scratch) const {
  if (library_ != nullptr) return run_library(x, y, y_stride, rows, scratch);
  run_low_bit(x, residual, y, y_stride, rows, scratch);
}

void TransformerLinear::run_library(const std::byte* x, std::byte* y, std::int64_t y_stride, std::int64_t rows,
                                    std::byte* scratch) const {
  if (norm_ != Norm::none) {
    const cpu::NormParameters norm = library_norm();
    const std::size_t from = size_of(shape_.dtype), to = size_of(precision_);
    for (std::int64_t i = 0; i < rows; ++i) {
      const auto at = static_cast<std::size_t>(i * shape_.in);
      cpu::kernels().linear.norm_row(norm, x + from * at, shape_.dtype, shape_.in, scratch + to * at, precision_);
    }
    x = scratch;
  } else if (precision_ != shape_.dtype) {
    convert(x, shape_.dtype, rows * shape_.in, scratch);
    x = scratch;
  }
  if (shape_.role != LinearRole::project) return library_->run(x, y, rows, scratch + library_at_);
  std::byte* own = scratch + y_at_;
  library_->run(x, own, rows, scratch + library_at_);
  const std::size_t row_bytes = size_of(shape_.dtype) * static_cast<std::size_t>(shape_.out);
  for (std::int64_t i = 0; i < rows; ++i) {
    std::byte* to = y + size_of(shape_.dtype) * static_cast<std::size_t>(i * y_stride);
    const std::byte* from = own + size_of(library_y_) * static_cast<std::size_t>(i * shape_.out);
    if (library_y_ == shape_.dtype) {
      std::memcpy(to, from, row_bytes);
    } else {
      convert(from, library_y_, shape_.out, to);
    }
  }
}

void TransformerLinear::run_low_bit(const std::byte* x, const std::byte* residual, std::byte* y, std::int64_t y_stride,
                                    std::int64_t rows, std::byte* scratch) const {
  const DType dtype = shape_.dtype;
  // More than eight, so that bits of bf16 pairs do not depend on how many there are.
  const std::int64_t count = dtype == DType::bf16 ? whole_steps(rows) : rows;
  const bool widened = shape_.role == LinearRole::sum && dtype != DType::f32;
  LinearOptions options = packed_options();
  if (residual != nullptr) options.residual = TensorView(residual, dtype, {count, shape_.out});
  linear_forward(TensorView(x, dtype, {count, shape_.in}), packed_,
                 TensorView(widened ? scratch : y, dtype, {count, outputs()}, {y_stride, 1}), options,
                 inline_runtime({scratch + library_at_, library_bytes_}));
  if (widened) convert(scratch, dtype, rows * shape_.out, y);
}

TensorView TransformerLinear::on_gpu(const GpuRows& of, std::int64_t rows, std::int64_t columns) const {
  TensorView view(of.data, shape_.dtype, {rows, columns}, {of.stride, 1});
  view.device = Device::cuda;
  return view;
}

LinearOptions TransformerLinear::gpu_options(const GpuRows& residual, std::int64_t rows) const {
  LinearOptions options = packed_options();
  if (shape_.role == LinearRole::sum) options.residual = on_gpu(residual, rows, shape_.out);
  return options;
}

std::size_t TransformerLinear::gpu_workspace(std::int64_t rows) const {
  return linear_forward_workspace(on_gpu({nullptr, shape_.in}, rows, shape_.in), packed_,
                                  gpu_options({nullptr, shape_.out}, rows));
}

void TransformerLinear::run_on_gpu(const GpuRows& x, const GpuRows& residual, const GpuRows& y, std::int64_t rows,
                                   const Runtime& runtime) const {
  linear_forward(on_gpu(x, rows, shape_.in), packed_, on_gpu(y, rows, outputs()), gpu_options(residual, rows), runtime);
}

}  // namespace heddle
