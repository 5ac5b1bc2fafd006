#include "operations.h"

#include <algorithm>

#include "cuda/backend.h"
#include "heddle/linear.h"
#include "problem.h"
#include "tensors.h"

namespace heddle::cli {
namespace {

// Adds what candidates of `device` say of one call to what they said of those before: one that took a call runs here.
void add(Operation& operation, Device device, const std::vector<Candidate>& asked) {
  for (const Candidate& c : asked) {
    if (c.device != device) continue;
    auto known = std::ranges::find(operation.candidates, c.name, &CandidateFact::name);
    if (known == operation.candidates.end()) {
      operation.candidates.push_back({c.name, c.method, device == Device::cuda ? "cuda" : "cpu", c.reason});
      known = operation.candidates.end() - 1;
    }
    if (c.supported) known->refusal.clear();
  }
}

// A linear layer, which nobody computes.
struct LinearSample {
  static constexpr std::int64_t kRows = 16, kSize = 1024;
  HostTensor rows, gradient, codes;
  TensorView x, dx;
  PackedWeights weights;

  LinearSample(Device device, const char* format, WeightOrder order)
      : rows(DType::bf16, {kRows, kSize}),
        gradient(DType::bf16, {kRows, kSize}),
        x(rows.view()),
        dx(gradient.view()),
        weights(packed_storage(lowbit::format_named(format), kSize, kSize, false, order)) {
    codes = HostTensor(weights.data.dtype, {weights.data.shape[0]});
    weights.data.data = codes.data();
    for (Device* at : {&x.device, &dx.device, &weights.device, &weights.data.device}) *at = device;
  }
};

}  // namespace

std::vector<Operation> operations() {
  Operation forward{"attention_forward", {}}, backward{"attention_backward", {}}, linear{"linear_forward", {}},
      linear_backward{"linear_backward", {}};
  ProblemFlags sample;
  for (const Device device : {Device::cpu, Device::cuda}) {
    sample.device = device == Device::cuda ? "cuda" : "cpu";
    sample.dtype = device == Device::cuda ? "bf16" : "f32";
    const ProblemTensors t(sample, ProblemTensors::Memory::none);
    add(forward, device, explain_attention(t.q, t.k, t.v, t.options, Pass::forward));
    add(backward, device, explain_attention(t.q, t.k, t.v, t.options, Pass::backward));
  }
  ProblemFlags decode = sample;
  decode.length_q = 1;
  const ProblemTensors row(decode, ProblemTensors::Memory::none);
  add(forward, Device::cuda, explain_attention(row.q, row.k, row.v, row.options, Pass::forward));
  AttentionOptions int8_qk = row.options;
  int8_qk.precision = Precision::int8_qk;
  const ProblemTensors t(sample, ProblemTensors::Memory::none);
  add(forward, Device::cuda, explain_attention(t.q, t.k, t.v, int8_qk, Pass::forward));

  const struct {
    Device device;
    const char* format;
    WeightOrder order;
  } kLayers[] = {{Device::cpu, "int4_g64", WeightOrder::rows16},
                 {Device::cuda, "int4_g64", WeightOrder::fragments16},
                 {Device::cuda, "mxfp4", WeightOrder::fragments8},
                 {Device::cuda, "int4_g64", WeightOrder::matrix},
                 {Device::cuda, "fp8_row", WeightOrder::matrix8}};
  for (const auto& layer : kLayers) {
    const LinearSample s(layer.device, layer.format, layer.order);
    add(linear, layer.device, explain_linear(s.x, s.weights));
    LinearGradients gradients;
    gradients.dx = s.dx;
    add(linear_backward, layer.device, explain_linear_backward(s.x, {}, s.weights, gradients));
  }
  return {forward, backward, linear, linear_backward};
}

}  // namespace heddle::cli
