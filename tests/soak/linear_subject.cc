#include <random>

#include "soak/subject.h"

namespace heddle::soak {
namespace {

class LinearCall : public Subject {
 public:
  LinearCall(const LinearSubject& spec, std::uint64_t seed)
      : s(spec), x_(static_cast<std::size_t>(s.rows * s.k) * size_of(s.dtype)) {
    pack(seed);
    fill_normal(x_.data(), s.dtype, s.rows * s.k, seed + 1);
    x = view(x_.data(), s.k);
    options.force = s.candidate;
    options.int8_x = s.int8_x;
    // x in 8 bits is rounded to a part in 16 of each number.
    const bool rounds_x = s.int8_x || s.order == WeightOrder::fragments8 || s.order == WeightOrder::matrix8;
    outputs.emplace_back("y", s.dtype, s.rows, s.n, rounds_x ? 0.08 : 0.02);
    const DeviceMemory w(static_cast<std::size_t>(s.n * s.k) * sizeof(float));
    TensorView w_view(w.data(), DType::f32, {s.n, s.k});
    w_view.device = Device::cuda;
    unpack_weights(weights, w_view);
    finish();
    reference_product(x.data, s.dtype, static_cast<const float*>(w.data()), s.rows, s.n, s.k, outputs[0].reference());
    finish();
    outputs[0].average = root_mean_square(outputs[0].reference(), s.rows * s.n);
    scratch = DeviceMemory(linear_forward_workspace(x, weights, options));
  }

  void launch(int slot, void* stream) override {
    Runtime runtime;
    runtime.stream = stream;
    runtime.workspace = {scratch.data(), scratch.bytes()};
    linear_forward(x, weights, view(outputs[0].slot(slot), s.n), options, runtime);
  }

 private:
  TensorView view(void* data, std::int64_t width) const {
    TensorView out(data, s.dtype, {s.rows, width});
    out.device = Device::cuda;
    return out;
  }

  void pack(std::uint64_t seed) {
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
    lowbit::quantize(TensorView(w.data(), DType::f32, {s.n, s.k}), {}, matrix);
    weights = packed_storage(matrix.format, s.n, s.k, false, s.order);
    const auto bytes = static_cast<std::size_t>(weights.data.shape[0]);
    WorkspaceBuffer packed;  // aligned
    weights.data.data = packed.get(bytes).data;
    pack_weights(matrix, weights);
    weights_ = DeviceMemory(bytes);
    weights_.write(0, weights.data.data, bytes);
    weights.data.data = weights_.data();
    weights.device = weights.data.device = Device::cuda;
  }

  const LinearSubject s;
  DeviceMemory x_, weights_, scratch;
  TensorView x;
  PackedWeights weights;
  LinearOptions options;
};

}  // namespace

std::unique_ptr<Subject> make_subject(const LinearSubject& spec, std::uint64_t seed) {
  return std::make_unique<LinearCall>(spec, seed);
}

}  // namespace heddle::soak
