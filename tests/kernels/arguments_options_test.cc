// Bad options: numbers, biases and masks, scales of 8-bit operands, drafts.
#include <cstdlib>
#include <limits>

#include "heddle/error.h"
#include "kernels/bad_arguments.h"
#include "kernels/elsewhere.h"

namespace heddle {
namespace {

const float kNan = std::numeric_limits<float>::quiet_NaN();
const float kInfinity = std::numeric_limits<float>::infinity();

INSTANTIATE_TEST_SUITE_P(
    Options, BadArguments,
    ::testing::Values(
        BadArgument{"scale_nan", [](Call& c) { c.options.scale = kNan; }, "scale is nan: it must be finite"},
        BadArgument{"softcap_negative", [](Call& c) { c.options.softcap = -1; }, "softcap is -1"},
        BadArgument{"softcap_infinite", [](Call& c) { c.options.softcap = kInfinity; }, "softcap is inf"},
        BadArgument{"window", [](Call& c) { c.options.window_left = -2; },
                    "window is (-2, -1): each side must be at least 0, or -1 for open"},
        BadArgument{"dropout_1", [](Call& c) { c.options.dropout.p = 1; }, "dropout.p is 1: it must be in [0, 1)"},
        BadArgument{"dropout_negative", [](Call& c) { c.options.dropout.p = -0.1f; }, "dropout.p is -0.1"},
        BadArgument{"dropout_nan", [](Call& c) { c.options.dropout.p = kNan; }, "dropout.p is nan"},
        BadArgument{"alibi_shape", [](Call& c) { c.options.alibi_slopes = c.floats({3}); },
                    "alibi_slopes is [3]: it must be [H] = [4] or [B, H] = [2, 4]"},
        BadArgument{"alibi_batch",
                    [](Call& c) {
                      c.options.alibi_slopes = c.floats({3, 4});
                    },
                    "alibi_slopes is [3, 4]"},
        BadArgument{"alibi_rank",
                    [](Call& c) {
                      c.options.alibi_slopes = c.floats({1, 2, 4});
                    },
                    "alibi_slopes is [1, 2, 4]"},
        BadArgument{"sink_shape", [](Call& c) { c.options.sink = c.floats({2}); },
                    "sink is [2]: it must have one logit for each of 4 heads"},
        BadArgument{"bias_rank",
                    [](Call& c) {
                      c.options.bias = c.floats({5, 7});
                    },
                    "bias has 2 dimensions"},
        BadArgument{"bias_extent",
                    [](Call& c) {
                      c.options.bias = c.floats({1, 2, 5, 7});
                    },
                    "bias is [1, 2, 5, 7]: dimension 1 must be 1 or 4"},
        BadArgument{"bias_dtype",
                    [](Call& c) {
                      c.options.bias = TensorView(c.data.data(), DType::f16, {1, 1, 5, 7});
                    },
                    "bias is float16: it must be float32"},
        BadArgument{"mask_floats",
                    [](Call& c) {
                      c.options.mask = c.floats({1, 1, 5, 7});
                    },
                    "mask is float32: it must be bool (true = attend); pass numbers that are added as bias"},
        BadArgument{"mask_extent",
                    [](Call& c) {
                      c.options.mask = TensorView(c.bits.data(), DType::boolean, {1, 1, 5, 8});
                    },
                    "mask is [1, 1, 5, 8]: dimension 3 must be 1 or 7"},
        BadArgument{"method", [](Call& c) { c.options.method = "fast"; }, "method is 'fast'"},
        BadArgument{"force", [](Call& c) { c.options.force = "sm70"; }, "force is 'sm70': the candidates are "},
        BadArgument{"force_elsewhere", [](Call& c) { c.options.force = "sm90"; },
                    "[attention_forward] force is 'sm90', which cannot serve this call: " + refusal_of_cpu_tensors()},
        BadArgument{"force_elsewhere_backward", [](Call& c) { c.options.force = "sm90"; },
                    "[attention_backward] force is 'sm90', which cannot serve this call: " + refusal_of_cpu_tensors(),
                    true}),
    name_of_test);

std::string refusal_of(Call& c) {
  try {
    c.forward();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Refusals, AreOfTheCandidateOrTheMethodThatWasAskedFor) {
  Call c;
  c.options.force = "cpu";
  c.options.precision = Precision::int8_qk;
  EXPECT_EQ(refusal_of(c),
            "[attention_forward] force is 'cpu', which cannot serve this call: it does not multiply q and k in 8 bits "
            "(int8_qk)");
  c.options.force = "";
  c.options.method = "baseline";
  const std::string words = refusal_of(c);
  EXPECT_TRUE(words.starts_with("[attention_forward] no candidate of method 'baseline' can serve this call; "))
      << words;
  EXPECT_EQ(words.find("cpu: "), std::string::npos) << words;
  EXPECT_EQ(words.find("another method"), std::string::npos) << words;
}

TEST(Refusals, NameTheVariableThatAsks) {
  Call c;
  ASSERT_EQ(setenv("HEDDLE_KERNEL", "sm90", 1), 0);
  const std::string words = refusal_of(c);
  unsetenv("HEDDLE_KERNEL");
  EXPECT_EQ(words,
            "[attention_forward] HEDDLE_KERNEL is 'sm90', which cannot serve this call: " + refusal_of_cpu_tensors());
}

INSTANTIATE_TEST_SUITE_P(
    NarrowAndDrafts, BadArguments,
    ::testing::Values(
        BadArgument{"f8_keys_beside_f32", [](Call& c) { c.k.dtype = c.v.dtype = DType::f8e4m3; },
                    "k is float8_e4m3fn: it must be float32"},
        BadArgument{"f8_keys_alone",
                    [](Call& c) { c.q.dtype = c.o.dtype = c.v.dtype = DType::bf16, c.k.dtype = DType::f8e4m3; },
                    "v is bfloat16 and k is float8_e4m3fn: they must be equal"},
        BadArgument{"f8_output", [](Call& c) { c.q.dtype = c.k.dtype = c.v.dtype = c.o.dtype = DType::f8e4m3; },
                    "o is float8_e4m3fn: beside q of float8_e4m3fn it must be bfloat16 or float16"},
        BadArgument{"scale_of_f32",
                    [](Call& c) {
                      c.options.k_scale = c.floats({1, 1, 1});
                    },
                    "k_scale is given and k is float32: scales belong to float8_e4m3fn"},
        BadArgument{"scale_shape",
                    [](Call& c) {
                      c.q.dtype = c.o.dtype = DType::f16, c.k.dtype = c.v.dtype = DType::f8e4m3;
                      c.options.v_scale = c.floats({2, 3, 2});
                    },
                    "v_scale is [2, 3, 2]: dimension 1 must be 1 or v's, 7"},
        BadArgument{"f8_on_the_cpu",
                    [](Call& c) { c.o.dtype = DType::f16, c.q.dtype = c.k.dtype = c.v.dtype = DType::f8e4m3; },
                    "cpu: it takes queries in float32, float16 and bfloat16, not float8_e4m3fn"},
        BadArgument{"draft_shape",
                    [](Call& c) {
                      c.options.draft_mask = TensorView(c.index.data(), DType::i32, {2, 4});
                    },
                    "draft_mask is [2, 4]: it must be [B, Sq] = [2, 5]"},
        BadArgument{"draft_long",
                    [](Call& c) {
                      c.q = c.floats({2, 33, 4, 8}),
                      c.options.draft_mask = TensorView(c.index.data(), DType::i32, {2, 33}, {0, 1});
                    },
                    "q has 33 rows a sequence: a draft has at most 32"},
        BadArgument{"f8_backward",
                    [](Call& c) { c.q.dtype = c.o.dtype = DType::f16, c.k.dtype = c.v.dtype = DType::f8e4m3; },
                    "k is float8_e4m3fn, which has no backward", true},
        BadArgument{"draft_backward",
                    [](Call& c) {
                      c.options.draft_mask = TensorView(c.index.data(), DType::i32, {2, 5});
                    },
                    "draft_mask has no backward: give the pairs as mask", true}),
    name_of_test);

}  // namespace
}  // namespace heddle
