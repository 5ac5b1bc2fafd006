#include <cmath>
#include <random>

#include "soak/subject.h"

namespace heddle::soak {
namespace {

TensorView on_gpu(const DeviceMemory& memory, DType dtype, std::initializer_list<std::int64_t> shape) {
  TensorView view(memory.data(), dtype, shape);
  view.device = Device::cuda;
  return view;
}

// A layer, or its gradients. W is decoded for the reference by the CPU, not by the kernels that are watched.
class LinearCall : public Subject {
 public:
  LinearCall(const LinearSubject& spec, std::uint64_t seed) : s(spec), outputs_of_row(gated() ? s.n / 2 : s.n) {
    const DeviceMemory w = pack(seed);
    // What goes into an activation is about 1.
    const float small = 1.0f / std::sqrt(static_cast<float>(s.k));
    const bool activated = s.activation != Activation::none;
    x_ = normal(s.rows * s.k, seed + 1, activated && !s.rms_norm ? small : 1.0f);
    x = on_gpu(x_, s.dtype, {s.rows, s.k});
    Linear layer = {x.data, s.dtype, static_cast<const float*>(w.data()), s.rows, s.n, s.k, s.activation};
    options.force = s.candidate;
    options.int8_x = s.int8_x;
    options.activation = s.activation;
    if (s.bias) {
      bias_ = normal(s.n, seed + 2, 1.0f);
      options.bias = on_gpu(bias_, s.dtype, {s.n});
      layer.bias = bias_.data();
    }
    if (s.rms_norm) {
      norm_weight_ = normal(s.k, seed + 3, small);
      options.norm = Norm::rms_norm;
      options.norm_weight = on_gpu(norm_weight_, s.dtype, {s.k});
      layer.norm_weight = norm_weight_.data();
    }
    if (s.gradients) {
      expect_gradients(layer, seed + 4);
    } else {
      expect_rows(layer);
    }
    for (Output& output : outputs) output.average = root_mean_square(output.reference(), output.rows * output.width);
  }

  void launch(int slot, void* stream) override {
    Runtime runtime;
    runtime.stream = stream;
    runtime.workspace = {scratch.data(), scratch.bytes()};
    if (s.gradients) {
      linear_backward(dy, x_of_gradients(), weights, gradients(slot), options, runtime);
    } else {
      linear_forward(x, weights,
                     on_gpu(outputs[0].slots[static_cast<std::size_t>(slot)], s.dtype, {s.rows, outputs_of_row}),
                     options, runtime);
    }
  }

 private:
  bool gated() const { return s.activation == Activation::swiglu; }

  DeviceMemory normal(std::int64_t count, std::uint64_t seed, float deviation) const {
    DeviceMemory memory(static_cast<std::size_t>(count) * size_of(s.dtype));
    fill_normal(memory.data(), s.dtype, count, seed, deviation);
    return memory;
  }

  void expect_rows(const Linear& layer) {
    // x in 8 bits is rounded to a part in 16 of each number.
    const bool rounds_x = s.int8_x || s.order == WeightOrder::fragments8 || s.order == WeightOrder::matrix8;
    outputs.emplace_back("y", s.dtype, s.rows, outputs_of_row, rounds_x ? 0.08 : 0.02);
    reference_linear(layer, outputs[0].reference());
    scratch = DeviceMemory(linear_forward_workspace(x, weights, options));
  }

  void expect_gradients(const Linear& layer, std::uint64_t seed) {
    dy_ = normal(s.rows * outputs_of_row, seed, 1.0f);
    dy = on_gpu(dy_, s.dtype, {s.rows, outputs_of_row});
    outputs.emplace_back("dx", s.dtype, s.rows, s.k, 0.02);
    // Sums of the columns, held to the reference a few at a time.
    outputs.emplace_back("dbias", s.dtype, s.n / kTogether, kTogether, 0.02);
    reference_linear_gradients(layer, dy.data, outputs[0].reference(), outputs[1].reference());
    if (!s.bias) outputs.pop_back();
    scratch = DeviceMemory(linear_backward_workspace(dy, x_of_gradients(), weights, gradients(0), options));
  }

  // Without an activation nothing is kept of the forward.
  TensorView x_of_gradients() const { return s.activation == Activation::none ? TensorView() : x; }
  LinearGradients gradients(int slot) const {
    const auto n = static_cast<std::size_t>(slot);
    LinearGradients to;
    to.dx = on_gpu(outputs[0].slots[n], s.dtype, {s.rows, s.k});
    if (s.bias) to.dbias = on_gpu(outputs[1].slots[n], s.dtype, {s.n});
    return to;
  }

  // Makes the weights, and a copy in 16 bits if one is kept; returns what they stand for, in f32.
  DeviceMemory pack(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<float> w(static_cast<std::size_t>(s.n * s.k));
    for (float& value : w) {  // nearly normal: four uniform numbers of 16 bits
      std::uint64_t bits = random(), sum = 0;
      for (int n = 0; n < 4; ++n, bits >>= 16) sum += bits & 0xFFFF;
      value = (static_cast<float>(sum) - 131070.0f) / 37837.0f;
    }
    lowbit::QuantizedMatrix matrix = lowbit::storage(lowbit::format_named(s.format), s.n, s.k);
    std::vector<std::vector<std::byte>> held;
    for (TensorView* part : {&matrix.codes, &matrix.scales, &matrix.zeros, &matrix.global_scale}) {
      if (!part->given()) continue;
      held.emplace_back(static_cast<std::size_t>(part->elements()) * size_of(part->dtype));
      part->data = held.back().data();
    }
    const TensorView w_view(w.data(), DType::f32, {s.n, s.k});
    lowbit::quantize(w_view, {}, matrix);
    weights = packed_storage(matrix.format, s.n, s.k, gated(), s.order);
    const auto bytes = static_cast<std::size_t>(weights.data.shape[0]);
    WorkspaceBuffer packed;  // aligned
    weights.data.data = packed.get(bytes).data;
    pack_weights(matrix, weights);
    // fragments8 rounds weights once more.
    if (s.order == WeightOrder::fragments8) {
      unpack_weights(weights, w_view);
    } else {
      lowbit::dequantize(matrix, w_view);
    }
    weights_ = DeviceMemory(bytes);
    weights_.write(0, weights.data.data, bytes);
    weights.data.data = weights_.data();
    weights.device = weights.data.device = Device::cuda;
    if (s.kept) {
      std::vector<std::uint16_t> rounded(w.size());
      lowbit::dequantize(matrix, TensorView(rounded.data(), s.dtype, {s.n, s.k}));
      kept_ = uploaded(rounded);
      weights.kept = on_gpu(kept_, s.dtype, {s.n, s.k});
    }
    return uploaded(w);
  }

  static constexpr std::int64_t kTogether = 8;

  const LinearSubject s;
  const std::int64_t outputs_of_row;
  DeviceMemory x_, dy_, bias_, norm_weight_, weights_, kept_, scratch;
  TensorView x, dy;
  PackedWeights weights;
  LinearOptions options;
};

}  // namespace

std::unique_ptr<Subject> make_subject(const LinearSubject& spec, std::uint64_t seed) {
  return std::make_unique<LinearCall>(spec, seed);
}

std::string cublaslt_refusal() {
  const DeviceMemory w(std::size_t{64} * 64 * 2), x(std::size_t{64} * 64 * 2);
  const PackedWeights weights = dense_weights(on_gpu(w, DType::bf16, {64, 64}));
  for (const Candidate& c : explain_linear(on_gpu(x, DType::bf16, {64, 64}), weights)) {
    if (c.name == "cublaslt") return c.supported ? "" : c.reason;
  }
  return "there is no candidate cublaslt";
}

}  // namespace heddle::soak
