// What linear layers and packing refuse: the words, and that nothing was written.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <ostream>
#include <string>

#include "heddle/error.h"
#include "kernels/elsewhere.h"
#include "kit/linear_layer.h"

namespace heddle {
namespace {

using kit::HostTensor;
using kit::PackedMemory;
using kit::QuantizedMemory;

QuantizedMemory zeros(const char* format) {
  QuantizedMemory memory(lowbit::format_named(format), 6, 64);
  const std::vector<float> weights(6 * 64, 0.5f);
  lowbit::quantize(TensorView(weights.data(), DType::f32, {6, 64}), {}, memory.matrix());
  return memory;
}

// A call that is right: 6 by 64 weights of nvfp4 and two rows of x.
struct Call {
  QuantizedMemory matrix = zeros("nvfp4");
  PackedMemory packed{matrix.matrix()}, out{packed_storage(lowbit::format_named("nvfp4"), 6, 64)};
  std::vector<float> x_data = std::vector<float>(256, 0.5f), y_data = std::vector<float>(256, -7.0f);
  TensorView x{x_data.data(), DType::f32, {2, 64}}, y{y_data.data(), DType::f32, {2, 6}};
  LinearOptions options;
  WorkspaceBuffer buffer;
  std::size_t missing = 0;  // bytes of the workspace

  PackedWeights& weights() { return packed.weights(); }
  void become(const char* format) {
    matrix = zeros(format);
    out = PackedMemory(packed_storage(lowbit::format_named(format), 6, 64));
  }
  TensorView view(std::initializer_list<std::int64_t> shape) { return {x_data.data(), DType::f32, shape}; }
};

struct Bad {
  const char* name;
  std::function<void(Call&)> spoil;
  std::string message;
  bool pack = false;
};
void PrintTo(const Bad& bad, std::ostream* out) { *out << bad.name; }

class LinearArguments : public ::testing::TestWithParam<Bad> {};

TEST_P(LinearArguments, AreRefusedWithAWordAndNothingIsWritten) {
  Call call;
  GetParam().spoil(call);
  try {
    if (GetParam().pack) {
      pack_weights(call.matrix.matrix(), call.out.weights());
    } else {
      Runtime runtime;
      runtime.workspace = call.buffer.get(1 << 20);
      runtime.workspace.bytes = call.missing > 0 ? call.missing : runtime.workspace.bytes;
      linear_forward(call.x, call.weights(), call.y, call.options, runtime);
    }
    ADD_FAILURE() << "was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(GetParam().message), std::string::npos) << error.what();
  }
  EXPECT_TRUE(std::ranges::all_of(call.y_data, [](float v) { return v == -7.0f; }));
  EXPECT_TRUE(call.out.untouched());
}

INSTANTIATE_TEST_SUITE_P(
    Forward, LinearArguments,
    ::testing::Values(
        Bad{"no_x", [](Call& c) { c.x = {}; }, "[linear_forward] x is missing"},
        Bad{"no_y", [](Call& c) { c.y = {}; }, "[linear_forward] y is missing"},
        Bad{"integer_x", [](Call& c) { c.x.dtype = DType::i32; },
            "x is int32: it must be float32, float16 or bfloat16"},
        Bad{"gpu_x", [](Call& c) { c.x.device = Device::cuda; }, "x is on another device than weights"},
        Bad{"null_x", [](Call& c) { c.x.data = nullptr; }, "x has no data"},
        Bad{"other_columns",
            [](Call& c) {
              c.x = c.view({2, 63});
            },
            "x is [2, 63] and weights have 64 columns: x must be [..., 64]"},
        Bad{"strided_x", [](Call& c) { c.x.stride[1] = 2; }, "x's last dimension has stride 2: it must be 1"},
        Bad{"other_dtype_of_y", [](Call& c) { c.y.dtype = DType::bf16; }, "y is bfloat16: it must be float32"},
        Bad{"other_rank_of_y", [](Call& c) { c.y = TensorView(c.y_data.data(), DType::f32, {12}); },
            "y has 1 dimensions: it must have 2"},
        Bad{"other_rows_of_y",
            [](Call& c) {
              c.y = TensorView(c.y_data.data(), DType::f32, {3, 6});
            },
            "y is [3, 6]: it must be [2, 6] for x [2, 64] and weights of 6 rows"},
        Bad{"overlapping_y", [](Call& c) { c.y.stride[0] = 3; }, "y is an output whose elements overlap"},
        Bad{"y_in_x", [](Call& c) { c.y.data = c.x_data.data() + 100; }, "y shares memory with x"},
        Bad{"y_in_weights", [](Call& c) { c.y.data = c.weights().data.data; }, "y shares memory with weights.data"},
        Bad{"gated_without_swiglu", [](Call& c) { c.weights().gated = true; },
            "activation is none and weights are packed for swiglu"},
        Bad{"swiglu_without_gates", [](Call& c) { c.options.activation = Activation::swiglu; },
            "activation is swiglu and weights are packed without gates"},
        Bad{"y_of_swiglu",
            [](Call& c) {
              c.options.activation = Activation::swiglu;
              c.weights().gated = true;
            },
            "y is [2, 6]: it must be [2, 3] for x [2, 64] and weights of 6 rows, gated"},
        Bad{"short_bias", [](Call& c) { c.options.bias = c.view({5}); }, "bias is [5]: it must be [N] = [6]"},
        Bad{"wide_bias",
            [](Call& c) {
              c.options.bias = c.view({1, 6});
            },
            "bias has 2 dimensions: it must have 1"},
        Bad{"strided_bias",
            [](Call& c) {
              c.options.bias = c.view({6});
              c.options.bias.stride[0] = 2;
            },
            "bias has stride 2: it must be contiguous"},
        Bad{"half_bias",
            [](Call& c) {
              c.options.bias = c.view({6});
              c.options.bias.dtype = DType::f16;
            },
            "bias is float16: it must be float32"},
        Bad{"bias_in_y",
            [](Call& c) {
              c.options.bias = c.view({6});
              c.options.bias.data = c.y_data.data() + 3;
            },
            "y shares memory with bias"},
        Bad{"other_residual",
            [](Call& c) {
              c.options.residual = c.view({2, 5});
            },
            "residual is [2, 5]: it must be [2, 6]"},
        Bad{"shifted_residual",
            [](Call& c) {
              c.options.residual = c.view({2, 6});
              c.options.residual.data = c.y_data.data() + 1;
            },
            "y shares memory with residual: it must be the residual itself or lie apart"},
        Bad{"no_weights", [](Call& c) { c.weights().data = {}; }, "weights.data is missing: it must be uint8 ["},
        Bad{"short_weights", [](Call& c) { c.weights().data.shape[0] -= 1; }, "weights.data is ["},
        Bad{"signed_weights", [](Call& c) { c.weights().data.dtype = DType::i8; },
            "weights.data is int8: it must be uint8"},
        Bad{"weights_of_a_gpu", [](Call& c) { c.weights().device = Device::cuda; },
            "weights.data is on another device than weights say"},
        Bad{"weights_moved_to_a_gpu", [](Call& c) { c.weights().device = c.weights().data.device = Device::cuda; },
            "weights are in order rows16 on a GPU"},
        Bad{"bytes_of_another_order", [](Call& c) { c.weights().order = WeightOrder::fragments16; },
            "weights.data is ["},
        Bad{"misaligned_weights",
            [](Call& c) { c.weights().data.data = static_cast<std::byte*>(c.weights().data.data) + 32; },
            "weights.data must be aligned to 64 bytes"},
        Bad{"unnamed_format", [](Call& c) { c.weights().format.group = 48; }, "format is none that has a name"},
        Bad{"bad_columns", [](Call& c) { c.weights().columns = 40; }, "K is 40: nvfp4 needs a multiple of its group"},
        Bad{"odd_gates",
            [](Call& c) {
              c.weights().gated = true;
              c.weights().rows = 5;
            },
            "rows is 5: gated weights have a gate and an up row of each output, so an even number"},
        Bad{"int8_for_other_formats",
            [](Call& c) {
              c.options.int8_x = true;
              c.weights().format = lowbit::format_named("nf4");
              c.weights().data.shape = packed_storage(c.weights().format, 6, 64).data.shape;
            },
            "int8_x is set and weights are nf4: products in integers take nvfp4, mxfp4, e2m1_row, int4 and int8_row"},
        Bad{"norm_weight_without_norm", [](Call& c) { c.options.norm_weight = c.view({64}); },
            "norm_weight is given and norm is none"},
        Bad{"norm_bias_of_rms_norm",
            [](Call& c) {
              c.options.norm = Norm::rms_norm;
              c.options.norm_bias = c.view({64});
            },
            "norm_bias is given and norm is rms_norm: only layer_norm has one"},
        Bad{"short_norm_weight",
            [](Call& c) {
              c.options.norm = Norm::rms_norm;
              c.options.norm_weight = c.view({6});
            },
            "norm_weight is [6]: it must be [K] = [64]"},
        Bad{"half_norm_bias",
            [](Call& c) {
              c.options.norm = Norm::layer_norm;
              c.options.norm_bias = c.view({64});
              c.options.norm_bias.dtype = DType::f16;
            },
            "norm_bias is float16: it must be float32"},
        Bad{"norm_weight_in_y",
            [](Call& c) {
              c.options.norm = Norm::layer_norm;
              c.options.norm_weight = c.view({64});
              c.options.norm_weight.data = c.y_data.data() + 3;
            },
            "y shares memory with norm_weight"},
        Bad{"negative_eps",
            [](Call& c) {
              c.options.norm = Norm::rms_norm;
              c.options.norm_eps = -1;
            },
            "norm_eps is -1: it must be finite and not negative"},
        Bad{"nan_eps",
            [](Call& c) {
              c.options.norm = Norm::rms_norm;
              c.options.norm_eps = std::nanf("");
            },
            "norm_eps is nan: it must be finite and not negative"},
        Bad{"small_workspace", [](Call& c) { c.missing = 64; }, "the workspace has 64 bytes: this call needs"},
        Bad{"unknown_candidate", [](Call& c) { c.options.force = "sm90"; },
            "force is 'sm90': the candidates are cpu, reference"},
        Bad{"candidate_elsewhere", [](Call& c) { c.options.force = "cublaslt"; },
            "force is 'cublaslt', which cannot serve this call: " + refusal_of_cpu_tensors()}),
    [](const auto& info) { return std::string(info.param.name); });

INSTANTIATE_TEST_SUITE_P(
    Pack, LinearArguments,
    ::testing::Values(
        Bad{"missing_codes", [](Call& c) { c.matrix.matrix().codes = {}; }, "[pack_weights] matrix.codes is missing",
            true},
        Bad{"other_rows", [](Call& c) { c.out.weights().rows = 5; }, "out is for another matrix", true},
        Bad{"other_format", [](Call& c) { c.out.weights().format = lowbit::format_named("mxfp4"); },
            "out is for another matrix", true},
        Bad{"no_memory", [](Call& c) { c.out.weights().data = {}; }, "out.data is missing", true},
        Bad{"null_memory", [](Call& c) { c.out.weights().data.data = nullptr; }, "out.data has no data", true},
        Bad{"shared_memory",
            [](Call& c) { c.matrix.matrix().codes.data = static_cast<std::byte*>(c.out.weights().data.data) + 5; },
            "out.data shares memory with matrix", true},
        Bad{"nan_scale", [](Call& c) { static_cast<std::uint8_t*>(c.matrix.matrix().scales.data)[5] = 0x7f; },
            "matrix.scales[1, 1] is nan with the global scale: it must be finite", true},
        Bad{"infinite_global_scale",
            [](Call& c) {
              *static_cast<float*>(c.matrix.matrix().global_scale.data) = std::numeric_limits<float>::infinity();
            },
            "matrix.global_scale is inf: it must be finite", true},
        Bad{"e8m0_nan",
            [](Call& c) {
              c.become("mxfp4");
              static_cast<std::uint8_t*>(c.matrix.matrix().scales.data)[3] = 255;
            },
            "matrix.scales[1, 1] is nan: it must be finite", true},
        Bad{"nan_code",
            [](Call& c) {
              c.become("fp8_row");
              static_cast<std::uint8_t*>(c.matrix.matrix().codes.data)[70] = 0xff;
            },
            "matrix.codes[1, 6] is nan: it must be finite", true}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(LinearArguments, Names) {
  for (const char* name : {"none", "relu", "gelu_erf", "gelu_tanh", "silu", "swiglu"}) {
    EXPECT_STREQ(name_of(activation_named(name)), name);
  }
  try {
    activation_named("gelu");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "[linear] activation is 'gelu': it must be one of none, relu, gelu_erf, gelu_tanh, silu, swiglu");
  }
}

}  // namespace
}  // namespace heddle
