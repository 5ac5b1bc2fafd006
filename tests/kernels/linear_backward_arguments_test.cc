// What the gradients of linear layers refuse: the words, and that nothing was written.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <ostream>
#include <string>

#include "heddle/error.h"
#include "kernels/elsewhere.h"
#include "kit/linear_layer.h"

namespace heddle {
namespace {

// A call that is right: 6 by 64 weights of mxfp4, two rows, every gradient.
struct Call {
  kit::QuantizedMemory matrix{lowbit::format_named("mxfp4"), 6, 64};
  std::vector<float> read = std::vector<float>(1024, 0.5f), written = std::vector<float>(1024, -7.0f);
  std::vector<kit::PackedMemory> packed;
  PackedWeights weights;
  TensorView dy{read.data(), DType::f32, {2, 6}}, x{read.data() + 64, DType::f32, {2, 64}};
  LinearGradients gradients;
  LinearOptions options;
  WorkspaceBuffer buffer;
  std::size_t missing = 0;  // bytes of the workspace

  Call() {
    lowbit::quantize(TensorView(read.data(), DType::f32, {6, 64}), {}, matrix.matrix());
    packed.emplace_back(matrix.matrix());
    weights = packed[0].weights();
    options.norm = Norm::layer_norm;
    gradients.dx = {written.data(), DType::f32, {2, 64}};
    gradients.dbias = {written.data() + 128, DType::f32, {6}};
    gradients.dnorm_weight = {written.data() + 192, DType::f32, {64}};
    gradients.dnorm_bias = {written.data() + 256, DType::f32, {64}};
  }
};

struct Bad {
  const char* name;
  std::function<void(Call&)> spoil;
  std::string message;
};
void PrintTo(const Bad& bad, std::ostream* out) { *out << bad.name; }

class LinearBackwardArguments : public ::testing::TestWithParam<Bad> {};

TEST_P(LinearBackwardArguments, AreRefusedWithAWordAndNothingIsWritten) {
  Call call;
  GetParam().spoil(call);
  Runtime runtime;
  runtime.workspace = call.buffer.get(1 << 20);
  runtime.workspace.bytes = call.missing > 0 ? call.missing : runtime.workspace.bytes;
  try {
    linear_backward(call.dy, call.x, call.weights, call.gradients, call.options, runtime);
    ADD_FAILURE() << "was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(GetParam().message), std::string::npos) << error.what();
  }
  EXPECT_TRUE(std::ranges::all_of(call.written, [](float v) { return v == -7.0f; }));
}

INSTANTIATE_TEST_SUITE_P(
    All, LinearBackwardArguments,
    ::testing::Values(
        Bad{"no_dy", [](Call& c) { c.dy = {}; }, "[linear_backward] dy is missing"},
        Bad{"integer_dy", [](Call& c) { c.dy.dtype = DType::i32; },
            "dy is int32: it must be float32, float16 or bfloat16"},
        Bad{"gpu_dy", [](Call& c) { c.dy.device = Device::cuda; }, "dy is on another device than weights"},
        Bad{"null_dy", [](Call& c) { c.dy.data = nullptr; }, "dy has no data"},
        Bad{"wide_dy",
            [](Call& c) {
              c.dy = {c.read.data(), DType::f32, {2, 7}};
            },
            "dy is [2, 7] and weights have 6 rows: dy must be [..., 6]"},
        Bad{"dy_of_swiglu",
            [](Call& c) {
              c.weights.gated = true;
              c.options.activation = Activation::swiglu;
            },
            "dy is [2, 6] and weights have 6 rows, gated: dy must be [..., 3]"},
        Bad{"strided_dy", [](Call& c) { c.dy.stride[1] = 0; }, "dy's last dimension has stride 0: it must be 1"},
        Bad{"no_x", [](Call& c) { c.x = {}; }, "x is missing: with an activation or a norm it is read again"},
        Bad{"half_x", [](Call& c) { c.x.dtype = DType::f16; }, "x is float16: it must be float32"},
        Bad{"other_rows_of_x",
            [](Call& c) {
              c.x = {c.read.data(), DType::f32, {3, 64}};
            },
            "x is [3, 64]: it must be [2, 64] for dy [2, 6]"},
        Bad{"short_bias",
            [](Call& c) {
              c.options.bias = {c.read.data(), DType::f32, {5}};
            },
            "bias is [5]: it must be [N] = [6]"},
        Bad{"other_dx",
            [](Call& c) {
              c.gradients.dx = {c.written.data(), DType::f32, {2, 63}};
            },
            "dx is [2, 63]: it must be [2, 64], as x"},
        Bad{"overlapping_dx", [](Call& c) { c.gradients.dx.stride[0] = 60; }, "dx is an output whose elements overlap"},
        Bad{"short_dbias",
            [](Call& c) {
              c.gradients.dbias = {c.written.data(), DType::f32, {5}};
            },
            "dbias is [5]: it must be [N] = [6]"},
        Bad{"wide_dnorm_weight", [](Call& c) { c.gradients.dnorm_weight.shape[0] = 65; },
            "dnorm_weight is [65]: it must be [K] = [64]"},
        Bad{"strided_dnorm_bias", [](Call& c) { c.gradients.dnorm_bias.stride[0] = 2; },
            "dnorm_bias has stride 2: it must be contiguous"},
        Bad{"no_norm", [](Call& c) { c.options.norm = Norm::none; }, "dnorm_weight is given and norm is none"},
        Bad{"no_bias_of_rms_norm", [](Call& c) { c.options.norm = Norm::rms_norm; },
            "dnorm_bias is given and norm is rms_norm: only layer_norm has one"},
        Bad{"dx_in_dy", [](Call& c) { c.gradients.dx.data = c.read.data() + 3; }, "dx shares memory with dy"},
        Bad{"dx_in_x", [](Call& c) { c.gradients.dx.data = c.read.data() + 70; }, "dx shares memory with x"},
        Bad{"dbias_in_dx", [](Call& c) { c.gradients.dbias.data = c.written.data() + 5; },
            "dbias shares memory with dx"},
        Bad{"dbias_in_weights", [](Call& c) { c.gradients.dbias.data = c.weights.data.data; },
            "dbias shares memory with weights.data"},
        Bad{"small_workspace", [](Call& c) { c.missing = 64; }, "the workspace has 64 bytes: this call needs"},
        Bad{"unknown_candidate", [](Call& c) { c.options.force = "sm90"; },
            "force is 'sm90': the candidates are cpu, reference"},
        Bad{"candidate_elsewhere", [](Call& c) { c.options.force = "cublaslt"; },
            "force is 'cublaslt', which cannot serve this call: " + refusal_of_cpu_tensors()}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace heddle
