// What quantisation refuses: the words, and that nothing was written.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <ostream>
#include <random>

#include "heddle/error.h"
#include "kit/lowbit_weights.h"
#include "lowbit/formats.h"

namespace heddle::lowbit {
namespace {

using kit::QuantizedMemory;

// A call that is right: 4 by 64 to int4_g32_zp; quantise, then back.
struct Call {
  std::vector<float> data = std::vector<float>(1024, 0.5f), importance_data = std::vector<float>(64, 1.0f);
  std::vector<float> written = std::vector<float>(1024, -7.0f);
  QuantizedMemory memory{format_named("int4_g32_zp"), 4, 64};
  TensorView weights{data.data(), DType::f32, {4, 64}}, out{written.data(), DType::f32, {4, 64}};
  TensorView row_sqnr{written.data() + 256, DType::f32, {4}}, row_max{written.data() + 260, DType::f32, {4}};
  QuantizeOptions options;
  WorkspaceBuffer buffer;
  std::size_t workspace = quantization_error_workspace(4);

  QuantizedMatrix& matrix() { return memory.matrix(); }
  void become(const char* format) { memory = QuantizedMemory(format_named(format), 4, 64); }
  bool untouched() const {
    return memory.untouched() && std::all_of(written.begin(), written.end(), [](float x) { return x == -7.0f; });
  }
};

enum class Verb { quantize, dequantize, error };

struct Bad {
  const char* name;
  std::function<void(Call&)> spoil;
  const char* message;
  Verb verb = Verb::quantize;
};
void PrintTo(const Bad& bad, std::ostream* out) { *out << bad.name; }

class LowbitArguments : public ::testing::TestWithParam<Bad> {};

TEST_P(LowbitArguments, AreRefusedWithAWordAndNothingIsWritten) {
  Call call;
  GetParam().spoil(call);
  try {
    switch (GetParam().verb) {
      case Verb::quantize:
        quantize(call.weights, call.options, call.matrix());
        break;
      case Verb::dequantize:
        dequantize(call.matrix(), call.out);
        break;
      case Verb::error:
        Runtime runtime;
        runtime.workspace = call.buffer.get(1024);
        runtime.workspace.bytes = call.workspace;
        quantization_error(call.weights, call.matrix(), call.row_sqnr, call.row_max, runtime);
        break;
    }
    ADD_FAILURE() << "was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(GetParam().message), std::string::npos) << error.what();
  }
  EXPECT_TRUE(call.untouched());
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();

INSTANTIATE_TEST_SUITE_P(
    Quantize, LowbitArguments,
    ::testing::Values(
        Bad{"no_weights", [](Call& c) { c.weights = {}; }, "[quantize] weights is missing"},
        Bad{"integer_weights", [](Call& c) { c.weights.dtype = DType::i32; },
            "weights is int32: it must be float32, float16 or bfloat16"},
        Bad{"codes_as_weights", [](Call& c) { c.weights.dtype = DType::u8; }, "weights is uint8"},
        Bad{"gpu_weights", [](Call& c) { c.weights.device = Device::cuda; },
            "out.codes is on the CPU and other tensors are on a GPU: they must be on one"},
        Bad{"gpu_codes_to_write", [](Call& c) { c.matrix().codes.device = Device::cuda; },
            "out.codes is on a GPU: this operation runs on the CPU, or all of its tensors are on one GPU"},
        Bad{"gpu_importance",
            [](Call& c) {
              c.options.rule = ScaleRule::mse;
              c.options.importance = TensorView(c.importance_data.data(), DType::f32, {64});
              c.options.importance.device = Device::cuda;
            },
            "importance is on another device than weights"},
        Bad{"three_dimensions",
            [](Call& c) {
              c.weights = TensorView(c.data.data(), DType::f32, {2, 2, 64});
            },
            "weights has 3 dimensions: it must be [N, K]; found weights [2, 2, 64]"},
        Bad{"null_weights", [](Call& c) { c.weights.data = nullptr; }, "weights has no data"},
        Bad{"other_shape",
            [](Call& c) {
              c.weights = TensorView(c.data.data(), DType::f32, {4, 32});
            },
            "out is for a matrix of [4, 64] and weights is [4, 32]: they must be equal"},
        Bad{"nan", [](Call& c) { c.data[2 * 64 + 5] = std::nanf(""); }, "weights[2, 5] is nan: weights must be finite"},
        Bad{"negative_nan", [](Call& c) { c.data[255] = -std::nanf(""); }, "weights[3, 63] is"},
        Bad{"infinity", [](Call& c) { c.data[64] = c.data[200] = -kInfinity; },
            "weights[1, 0] is -inf: weights must be finite"},
        Bad{"bf16_infinity",
            [](Call& c) {
              c.weights.dtype = DType::bf16;
              reinterpret_cast<std::uint16_t*>(c.data.data())[7] = 0x7f80;
            },
            "weights[0, 7] is inf"},
        Bad{"f16_nan",
            [](Call& c) {
              c.weights.dtype = DType::f16;
              reinterpret_cast<std::uint16_t*>(c.data.data())[64] = 0xfe01;
            },
            "weights[1, 0] is"},
        Bad{"beyond_f16_scales", [](Call& c) { c.data[66] = -5e5f; },
            "weights[1, 2] is -500000: int4_g32_zp has float16 scales, which serve weights up to 458528"},
        Bad{"unnamed_format", [](Call& c) { c.matrix().format.group = 48; }, "format is none that has a name"},
        Bad{"bad_columns", [](Call& c) { c.matrix().columns = 40, c.weights.shape[1] = 40; },
            "K is 40: int4_g32_zp needs a multiple of its group, 32; the next is 64"},
        Bad{"negative_rows", [](Call& c) { c.matrix().rows = c.weights.shape[0] = -4; }, "weights has extent -4"},
        Bad{"no_codes", [](Call& c) { c.matrix().codes = {}; },
            "out.codes is missing: int4_g32_zp has them as uint8 [4, 32]"},
        Bad{"signed_codes", [](Call& c) { c.matrix().codes.dtype = DType::i8; },
            "out.codes is int8: int4_g32_zp has uint8"},
        Bad{"few_codes", [](Call& c) { c.matrix().codes.shape[1] = 31; },
            "out.codes is [4, 31]: it must be [4, 32] for int4_g32_zp"},
        Bad{"strided_codes", [](Call& c) { c.matrix().codes.stride[0] = 64; }, "out.codes is not contiguous"},
        Bad{"gpu_codes", [](Call& c) { c.matrix().codes.device = Device::cuda; }, "out.codes is on a GPU"},
        Bad{"null_scales", [](Call& c) { c.matrix().scales.data = nullptr; }, "out.scales has no data"},
        Bad{"f32_scales", [](Call& c) { c.matrix().scales.dtype = DType::f32; },
            "out.scales is float32: int4_g32_zp has float16"},
        Bad{"no_zeros", [](Call& c) { c.matrix().zeros = {}; }, "out.zeros is missing"},
        Bad{"zeros_for_nvfp4",
            [](Call& c) {
              c.become("nvfp4");
              c.matrix().zeros = c.matrix().scales;
            },
            "out.zeros is given and nvfp4 has none"},
        Bad{"no_global_scale",
            [](Call& c) {
              c.become("nvfp4");
              c.matrix().global_scale = {};
            },
            "out.global_scale is missing"},
        Bad{"wrong_rule", [](Call& c) { c.options.rule = ScaleRule::four_six; },
            "rule is four_six, which int4_g32_zp does not have"},
        Bad{"rule_of_mxfp4",
            [](Call& c) {
              c.become("nvfp4");
              c.options.rule = ScaleRule::floor;
            },
            "rule is floor, which nvfp4 does not have"},
        Bad{"idle_importance",
            [](Call& c) { c.options.importance = TensorView(c.importance_data.data(), DType::f32, {64}); },
            "importance is given and rule is plain"},
        Bad{"short_importance",
            [](Call& c) {
              c.options = {ScaleRule::mse, TensorView(c.importance_data.data(), DType::f32, {63}), 0};
            },
            "importance is [63]: it must be [K] = [64]"},
        Bad{"negative_importance",
            [](Call& c) {
              c.importance_data[9] = -1;
              c.options = {ScaleRule::mse, TensorView(c.importance_data.data(), DType::f32, {64}), 0};
            },
            "importance[9] is -1: it must be finite and at least 0"},
        Bad{"half_importance",
            [](Call& c) {
              c.options = {ScaleRule::mse, TensorView(c.importance_data.data(), DType::f16, {64}), 0};
            },
            "importance is float16: it must be float32"},
        Bad{"global_scale_without_one", [](Call& c) { c.options.global_scale = 1; },
            "global_scale is given and int4_g32_zp has none"},
        Bad{"bad_global_scale",
            [](Call& c) {
              c.become("nvfp4");
              c.options.global_scale = std::nanf("");
            },
            "global_scale is nan: it must be positive and finite"},
        Bad{"written_over_itself",
            [](Call& c) {
              c.weights.data = c.matrix().codes.data;
              c.weights.stride = {16, 0};
            },
            "out.codes shares memory with weights"},
        Bad{"zeros_in_codes", [](Call& c) { c.matrix().zeros.data = c.matrix().codes.data; },
            "out.zeros shares memory with out.codes"}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Others, LowbitArguments,
    ::testing::Values(
        Bad{"no_out", [](Call& c) { c.out = {}; }, "[dequantize] out is missing", Verb::dequantize},
        Bad{"wide_out", [](Call& c) { c.out.shape[1] = 65; }, "out is [4, 65]: it must be [4, 64]", Verb::dequantize},
        Bad{"e4m3_out", [](Call& c) { c.out.dtype = DType::f8e4m3; }, "out is float8_e4m3fn", Verb::dequantize},
        Bad{"overlapping_out",
            [](Call& c) {
              c.out.stride = {1, 1};
            },
            "out is an output whose elements overlap", Verb::dequantize},
        Bad{"out_in_codes", [](Call& c) { c.matrix().codes.data = c.out.data; }, "out shares memory with the matrix",
            Verb::dequantize},
        Bad{"matrix_without_scales", [](Call& c) { c.matrix().scales = {}; }, "matrix.scales is missing",
            Verb::dequantize},
        Bad{"other_matrix", [](Call& c) { c.weights.shape[0] = 3; },
            "[quantization_error] matrix is [4, 64] and weights is [3, 64]", Verb::error},
        Bad{"short_rows", [](Call& c) { c.row_max.shape[0] = 3; }, "row_max is [3]: it must be [N] = [4]", Verb::error},
        Bad{"integer_rows", [](Call& c) { c.row_sqnr.dtype = DType::i32; }, "row_sqnr is int32: it must be float32",
            Verb::error},
        Bad{"no_workspace", [](Call& c) { c.workspace -= 1; }, "the workspace has", Verb::error}),
    [](const auto& info) { return info.param.name; });

// Views made from random numbers: each call throws Error or does its work inside its memory.
TEST(LowbitFuzz, ArgumentsBentAtRandom) {
  std::mt19937 random(7);
  const auto below = [&](int bound) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(bound)); };
  std::vector<std::string> names = format_names();
  int accepted = 0;
  for (int round = 0; round < 4000; ++round) {
    const Format format = format_named(names[below(static_cast<int>(names.size()))]);
    const std::int64_t N = 1 + below(3), K = format.group == 0 ? 1 + below(70) : format.group * (1 + below(2));
    QuantizedMemory memory(format, N, K);
    QuantizedMatrix& m = memory.matrix();
    std::vector<float> data(static_cast<std::size_t>(N * K), 0.25f), values(data.size());
    TensorView weights(data.data(), DType::f32, {N, K}), out(values.data(), DType::f32, {N, K});
    QuantizeOptions options;
    options.rule = static_cast<ScaleRule>(below(6));
    if (below(4) != 0) options.rule = ScaleRule::plain;
    TensorView* views[] = {&weights, &out, &m.codes, &m.scales, &m.zeros, &m.global_scale};
    for (std::int64_t bend = below(3); bend > 0; --bend) {
      TensorView& view = *views[below(6)];
      switch (below(9)) {
        case 0:
          view = {};
          break;
        case 1:
          view.dtype = size_of(view.dtype) == 4 ? DType::i32 : DType::boolean;
          break;
        case 2:
          view.rank = static_cast<int>(below(4));
          break;
        case 3:
          view.shape[below(2)] -= 1;
          break;
        case 4:
          view.shape[below(2)] = below(2) ? INT64_MAX : -1;
          break;
        case 5:
          if (view.rank > 0) view.data = nullptr;
          break;
        case 6:
          m.format.group = below(200);
          break;
        case 7:
          (below(2) ? m.rows : m.columns) += below(5) - 2;
          break;
        default:
          data[static_cast<std::size_t>(below(static_cast<int>(data.size())))] = below(2) ? kInfinity : 3e38f;
          break;
      }
    }
    try {
      quantize(weights, options, m);
      dequantize(m, out);
      ++accepted;
    } catch (const Error&) {
    }
    ASSERT_TRUE(memory.guards_intact());
  }
  EXPECT_GT(accepted, 500);
}

}  // namespace
}  // namespace heddle::lowbit
