#include "operations.h"

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "cuda/backend.h"
#include "heddle/linear.h"
#include "problem.h"
#include "tensors.h"

namespace heddle::cli {
namespace {

using Names = std::initializer_list<std::string_view>;

// Adds what candidates of `device` say of one call to what they said of those before: one that took a call runs here.
// Of the others the first call's reason stands, but that of the call which is for `own` candidates for those.
void add(Operation& operation, Device device, const std::vector<Candidate>& asked, Names own = {}) {
  for (const Candidate& c : asked) {
    if (c.device != device) continue;
    auto known = std::ranges::find(operation.candidates, c.name, &CandidateFact::name);
    const std::string refusal = c.supported ? "" : c.reason;  // a supported one may wait to be asked for by name
    if (known == operation.candidates.end()) {
      operation.candidates.push_back({c.name, c.method, device == Device::cuda ? "cuda" : "cpu", refusal});
    } else if (!known->refusal.empty() && (c.supported || std::ranges::find(own, c.name) != own.end())) {
      known->refusal = refusal;
    }
  }
}

// A linear layer, which nobody computes.
struct LinearSample {
  static constexpr std::int64_t kRows = 1, kSize = 1024;
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
  const auto ask = [&](const ProblemFlags& flags, DType dtype, Precision precision, Names own) {
    ProblemTensors t(flags, ProblemTensors::Memory::none);
    t.q.dtype = t.k.dtype = t.v.dtype = dtype;
    t.options.precision = precision;
    add(forward, Device::cuda, explain_attention(t.q, t.k, t.v, t.options), own);
  };
  ask(sample, DType::f8e4m3, Precision::f32, {"sm90_fp8"});
  ask(sample, DType::bf16, Precision::int8_qk, {"sm80_int8"});
  sample.length_q = 1;
  ask(sample, DType::bf16, Precision::f32, {"sm90_decode", "sm80_decode"});

  const struct {
    Device device;
    const char* format;
    WeightOrder order;
    std::string_view own;
  } kLayers[] = {{Device::cpu, "int4_g64", WeightOrder::rows16, ""},
                 {Device::cuda, "nvfp4", WeightOrder::fragments16, ""},
                 {Device::cuda, "mxfp4", WeightOrder::fragments8, "sm90_w4a8"},
                 {Device::cuda, "int4_g64", WeightOrder::matrix, "cublaslt"},
                 {Device::cuda, "fp8_row", WeightOrder::matrix8, "cublaslt_w8a8"}};
  for (const auto& layer : kLayers) {
    const LinearSample s(layer.device, layer.format, layer.order);
    add(linear, layer.device, explain_linear(s.x, s.weights), {layer.own});
    LinearGradients gradients;
    gradients.dx = s.dx;
    add(linear_backward, layer.device, explain_linear_backward(s.x, {}, s.weights, gradients), {layer.own});
  }
  return {forward, backward, linear, linear_backward};
}

}  // namespace heddle::cli
