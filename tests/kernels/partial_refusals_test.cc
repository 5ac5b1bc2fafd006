// What merge_attention and its gradients refuse, in words, before anything is written.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "heddle/error.h"
#include "heddle/partial.h"

namespace heddle {
namespace {

// A call that is right, and what spoils one thing in it.
struct MergeCall {
  std::vector<float> data = std::vector<float>(256, 0.5f), more = std::vector<float>(256, 0.5f),
                     written = std::vector<float>(1024, -7.0f);
  std::vector<Partial> partials{
      {TensorView(data.data(), DType::f32, {2, 3, 2, 4}), TensorView(data.data() + 100, DType::f32, {2, 2, 3})},
      {TensorView(more.data(), DType::f32, {2, 3, 2, 4}), TensorView(more.data() + 100, DType::f32, {2, 2, 3})}};
  TensorView sink, d_o{data.data(), DType::f32, {2, 3, 2, 4}}, d_lse, dsink;
  TensorView o{written.data(), DType::f32, {2, 3, 2, 4}}, lse{written.data() + 100, DType::f32, {2, 2, 3}};
  std::vector<Partial> gradients{{TensorView(written.data() + 200, DType::f32, {2, 3, 2, 4}),
                                  TensorView(written.data() + 300, DType::f32, {2, 2, 3})},
                                 {TensorView(written.data() + 400, DType::f32, {2, 3, 2, 4}),
                                  TensorView(written.data() + 500, DType::f32, {2, 2, 3})}};
};

struct BadMerge {
  const char* name;
  std::function<void(MergeCall&)> spoil;
  const char* message;
  bool backward = false;
};

class MergeRefuses : public ::testing::TestWithParam<BadMerge> {};

TEST_P(MergeRefuses, InWords) {
  MergeCall c;
  GetParam().spoil(c);
  try {
    if (GetParam().backward) {
      merge_attention_backward(c.partials, c.d_o, c.d_lse, c.gradients, c.dsink, {.sink = c.sink});
    } else {
      merge_attention(c.partials, c.o, c.lse, {.sink = c.sink});
    }
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(
        std::string(error.what()),
        std::string(GetParam().backward ? "[merge_attention_backward] " : "[merge_attention] ") + GetParam().message);
  }
  for (float x : c.written) ASSERT_EQ(x, -7.0f);
}

INSTANTIATE_TEST_SUITE_P(
    Partial, MergeRefuses,
    ::testing::Values(
        BadMerge{"none", [](MergeCall& c) { c.partials.clear(); }, "partials are none: there must be at least one"},
        BadMerge{"o_missing", [](MergeCall& c) { c.o = {}; }, "o is missing"},
        BadMerge{"partial_missing", [](MergeCall& c) { c.partials[1].o = {}; }, "partials[1].o is missing"},
        BadMerge{"partial_lse_missing", [](MergeCall& c) { c.partials[1].lse = {}; }, "partials[1].lse is missing"},
        BadMerge{"rank", [](MergeCall& c) { c.partials[0].o.rank = 2; },
                 "partials[0].o has 2 dimensions: it must be [B, Sq, H, Dv], or packed [total_q, H, Dv]"},
        BadMerge{"integers", [](MergeCall& c) { c.partials[0].o.dtype = DType::i32; },
                 "partials[0].o is int32: it must be float32, float16 or bfloat16"},
        BadMerge{"partial_gpu", [](MergeCall& c) { c.partials[1].o.device = Device::cuda; },
                 "partials[1].o is on another device than partials[0].o"},
        BadMerge{"dtypes", [](MergeCall& c) { c.partials[1].o.dtype = DType::bf16; },
                 "partials[1].o is bfloat16: it must be float32"},
        BadMerge{"shapes", [](MergeCall& c) { c.partials[1].o.shape[1] = 2; },
                 "partials[1].o is [2, 2, 2, 4]: it must have the shape of partials[0].o, [2, 3, 2, 4]"},
        BadMerge{"lse_shape", [](MergeCall& c) { c.partials[1].lse.shape[2] = 2; },
                 "partials[1].lse is [2, 2, 2]: it must be [B, H, Sq] of partials[0].o, [2, 3, 2, 4]"},
        BadMerge{"lse_dtype", [](MergeCall& c) { c.partials[0].lse.dtype = DType::f16; },
                 "partials[0].lse is float16: it must be float32"},
        BadMerge{"lse_out_shape", [](MergeCall& c) { c.lse.shape[0] = 1; },
                 "lse is [1, 2, 3]: it must be [B, H, Sq] of partials[0].o, [2, 3, 2, 4]"},
        BadMerge{"o_dtype", [](MergeCall& c) { c.o.dtype = DType::i32; },
                 "o is int32: it must be float32, float16 or bfloat16"},
        BadMerge{"o_dtype_beside_f16",
                 [](MergeCall& c) {
                   c.partials[0].o.dtype = c.partials[1].o.dtype = DType::f16;
                   c.o.dtype = DType::bf16;
                 },
                 "o is bfloat16: it must be float32 or have the partials' dtype, float16"},
        BadMerge{"sink_shape", [](MergeCall& c) { c.sink = TensorView(c.data.data(), DType::f32, {3}); },
                 "sink is [3]: it must have one logit for each of 2 heads"},
        BadMerge{"head_size",
                 [](MergeCall& c) {
                   c.partials = {{TensorView(c.data.data(), DType::f32, {1, 0, 1, 257}),
                                  TensorView(c.data.data(), DType::f32, {1, 1, 0})}};
                 },
                 "partials[0].o has head size 257: it must be from 1 to 256"},
        BadMerge{"o_meets_a_partial",
                 [](MergeCall& c) {
                   c.o = c.partials[1].o;
                   c.o.data = static_cast<float*>(c.o.data) + 1;
                 },
                 "o shares memory with partials[1].o without being it, which is read while it is written; found o "
                 "[2, 3, 2, 4], partials[1].o [2, 3, 2, 4]"},
        BadMerge{"o_meets_a_narrow_partial",
                 [](MergeCall& c) {
                   c.partials[0].o.dtype = c.partials[1].o.dtype = DType::f16;
                   c.o = c.partials[0].o;
                   c.o.dtype = DType::f32;
                 },
                 "o shares memory with partials[0].o without being it, which is read while it is written; found o "
                 "[2, 3, 2, 4], partials[0].o [2, 3, 2, 4]"},
        BadMerge{"outputs_meet",
                 [](MergeCall& c) {
                   c.lse = TensorView(c.written.data(), DType::f32, {2, 2, 3});
                 },
                 "o and lse share memory: outputs must be apart; found o [2, 3, 2, 4], lse [2, 2, 3]"},
        BadMerge{"d_o_missing", [](MergeCall& c) { c.d_o = {}; }, "d_o is missing", true},
        BadMerge{"too_few_gradients", [](MergeCall& c) { c.gradients.pop_back(); },
                 "gradients are 1 and partials are 2: there must be as many", true},
        BadMerge{"dsink_alone", [](MergeCall& c) { c.dsink = TensorView(c.written.data(), DType::f32, {2}); },
                 "dsink is given but sink is not", true},
        BadMerge{"gradient_dtype", [](MergeCall& c) { c.gradients[1].o.dtype = DType::f16; },
                 "gradients[1].o is float16: it must be float32", true},
        BadMerge{"gradients_meet", [](MergeCall& c) { c.gradients[1].o = c.gradients[0].o; },
                 "gradients[0].o and gradients[1].o share memory: outputs must be apart; found [2, 3, 2, 4] and "
                 "[2, 3, 2, 4]",
                 true},
        BadMerge{"gradient_meets_d_o", [](MergeCall& c) { c.d_o = c.gradients[0].o; },
                 "gradients[0].o shares memory with d_o, which is read while it is written; found gradients[0].o "
                 "[2, 3, 2, 4], d_o [2, 3, 2, 4]",
                 true}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace heddle
