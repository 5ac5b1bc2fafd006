// Bad arguments of pieces of longer problems: offsets, o and gradients in float32.
#include "kernels/bad_arguments.h"
#include "ops/attention/choice.h"

namespace heddle {
namespace {

void bias_of_12_columns(Call& c) { c.options.bias = c.floats({1, 4, 5, 12}); }

INSTANTIATE_TEST_SUITE_P(
    Pieces, BadArguments,
    ::testing::Values(
        BadArgument{"q_offset_negative",
                    [](Call& c) {
                      c.options.q_offset = c.indices({0, -1});
                    },
                    "q_offset[1] is -1: it must be at least 0"},
        BadArgument{"key_offset_negative",
                    [](Call& c) {
                      c.options.key_offset = c.indices({-3, 0});
                    },
                    "key_offset[0] is -3: it must be at least 0"},
        BadArgument{
            "q_offset_far",
            [](Call& c) {
              c.options.q_offset = c.indices({0, 2147483643});
            },
            "q_offset[1] is 2147483643: with 5 rows sequence 1 ends at position 2147483648, and positions number "
            "2147483647"},
        BadArgument{"key_offset_far",
                    [](Call& c) {
                      c.options.key_offset = c.indices({2147483641, 0});
                    },
                    "key_offset[0] is 2147483641: with 7 rows sequence 0 ends at position 2147483648, and positions "
                    "number 2147483647"},
        BadArgument{"key_offset_past_columns",
                    [](Call& c) {
                      bias_of_12_columns(c);
                      c.options.key_offset = c.indices({5, 6});
                    },
                    "key_offset[1] is 6: with 7 rows sequence 1 ends at position 13, and the columns of bias and mask "
                    "number 12"},
        BadArgument{"columns_too_few",
                    [](Call& c) {
                      c.options.mask = TensorView(c.bits.data(), DType::boolean, {1, 1, 1, 6});
                      c.options.q_offset = c.indices({3, 3});
                    },
                    "key_offset[0] is 0: with 7 rows sequence 0 ends at position 7, and the columns of bias and mask "
                    "number 6"},
        BadArgument{"columns_none",
                    [](Call& c) {
                      c.options.bias = c.floats({1, 4, 5, 0});
                      c.options.q_offset = c.indices({3, 3});
                    },
                    "key_offset[0] is 0: with 7 rows sequence 0 ends at position 7, and the columns of bias and mask "
                    "number 0"},
        BadArgument{"columns_differ",
                    [](Call& c) {
                      bias_of_12_columns(c);
                      c.options.mask = TensorView(c.bits.data(), DType::boolean, {1, 1, 1, 11});
                      c.options.key_offset = c.indices({1, 1});
                    },
                    "mask is [1, 1, 1, 11] and bias has 12 columns: both have one for each key of the longer problem"},
        BadArgument{"rows_of_the_longer",
                    [](Call& c) {
                      c.options.bias = c.floats({1, 4, 12, 12});
                      c.options.q_offset = c.indices({1, 1});
                    },
                    "bias is [1, 4, 12, 12]: dimension 2 must be 1 or 5"},
        BadArgument{"offsets_count", [](Call& c) { c.options.q_offset = c.indices({0}); },
                    "q_offset has 1 entries: it must have 2"},
        BadArgument{"offsets_dtype", [](Call& c) { c.options.key_offset = c.floats({2}); },
                    "key_offset is float32: it must be int32"},
        BadArgument{"offsets_bottom_right",
                    [](Call& c) {
                      c.options.causal = Causal::bottom_right;
                      c.options.key_offset = c.indices({0, 0});
                    },
                    "causal is bottom_right and key_offset is given: a piece does not know where the longer problem's "
                    "keys end; say top_left, whose diagonal is where positions are equal"},
        BadArgument{"offsets_draft",
                    [](Call& c) {
                      c.options.draft_mask = TensorView(c.index.data() + 32, DType::i32, {2, 5});
                      c.options.q_offset = c.indices({0, 0});
                    },
                    "draft_mask and q_offset exclude each other: a draft's keys are the last of the whole problem"},
        BadArgument{"q_step_0", [](Call& c) { c.options.q_step = 0; }, "q_step is 0: it must be from 1 to 2147483647"},
        BadArgument{"key_step_negative", [](Call& c) { c.options.key_step = -16; },
                    "key_step is -16: it must be from 1 to 2147483647"},
        BadArgument{"q_step_beyond_all_positions", [](Call& c) { c.options.q_step = INT64_MAX; },
                    "q_step is 9223372036854775807: it must be from 1 to 2147483647"},
        BadArgument{
            "q_step_far", [](Call& c) { c.options.q_step = 1 << 29; },
            "q_offset[0] is 0: with 5 rows 536870912 apart sequence 0 ends at position 2147483649, and positions "
            "number 2147483647"},
        BadArgument{"key_step_far",
                    [](Call& c) {
                      c.options.key_step = 300000000;
                      c.options.key_offset = c.indices({0, 347483647});
                    },
                    "key_offset[1] is 347483647: with 7 rows 300000000 apart sequence 1 ends at position 2147483648, "
                    "and positions number 2147483647"},
        BadArgument{"steps_bottom_right",
                    [](Call& c) {
                      c.options.causal = Causal::bottom_right;
                      c.options.key_step = 16;
                    },
                    "causal is bottom_right and key_step is 16: a piece does not know where the longer problem's keys "
                    "end; say top_left, whose diagonal is where positions are equal"},
        BadArgument{
            "steps_alibi",
            [](Call& c) {
              c.options.q_step = 4;
              c.options.alibi_slopes = c.floats({4});
            },
            "alibi_slopes is given and q_step is 4: what is said of single positions is not taken where rows or "
            "keys stand for several"},
        BadArgument{"steps_bias",
                    [](Call& c) {
                      c.options.key_step = 16;
                      c.options.bias = c.floats({1, 4, 5, 7});
                    },
                    "bias is given and key_step is 16: what is said of single positions"},
        BadArgument{"steps_mask",
                    [](Call& c) {
                      c.options.q_step = 2, c.options.key_step = 16;
                      c.options.mask = TensorView(c.bits.data(), DType::boolean, {1, 1, 1, 7});
                    },
                    "mask is given and q_step is 2: what is said of single positions"},
        BadArgument{"steps_draft",
                    [](Call& c) {
                      c.options.q_step = 4;
                      c.options.draft_mask = TensorView(c.index.data() + 32, DType::i32, {2, 5});
                    },
                    "draft_mask is given and q_step is 4: what is said of single positions"},
        BadArgument{"steps_dropout",
                    [](Call& c) {
                      c.options.key_step = 4;
                      c.options.dropout.p = 0.5f;
                    },
                    "dropout is given and key_step is 4: what is said of single positions"},
        BadArgument{"steps_backward", [](Call& c) { c.options.key_step = 0; },
                    "[attention_backward] key_step is 0: it must be from 1 to 2147483647", true},
        BadArgument{"offsets_backward",
                    [](Call& c) {
                      c.options.q_offset = c.indices({0, -1});
                    },
                    "[attention_backward] q_offset[1] is -1: it must be at least 0", true},
        BadArgument{"float32_out_narrow",
                    [](Call& c) {
                      c.q.dtype = c.k.dtype = c.v.dtype = c.o.dtype = DType::bf16;
                      c.options.float32_out = true;
                    },
                    "o is bfloat16: it must be float32, which was asked for"},
        BadArgument{"float32_without_asking", [](Call& c) { c.q.dtype = c.k.dtype = c.v.dtype = DType::bf16; },
                    "o is float32: it must be bfloat16, q's dtype, or float32 where that is asked for"},
        BadArgument{"gradient_other_dtype",
                    [](Call& c) {
                      c.q.dtype = c.k.dtype = c.v.dtype = c.o.dtype = c.d_o.dtype = DType::bf16;
                      c.gradients.dk.dtype = DType::f16;
                    },
                    "dk is float16: it must be bfloat16, q's dtype, or float32", true},
        BadArgument{"accumulate_narrow",
                    [](Call& c) {
                      c.q.dtype = c.k.dtype = c.v.dtype = c.o.dtype = c.d_o.dtype = DType::bf16;
                      c.gradients.dv.dtype = DType::bf16;
                      c.gradients.accumulate = true;
                    },
                    "dv is bfloat16: with accumulate it must be float32 on the CPU", true}),
    name_of_test);

// What a kernel says that knows nothing of pieces.
TEST(PiecesAreRefused, ByKernelsThatDoNotKnowThem) {
  using Forward = Operation<AttentionProblem>;
  using Backward = Operation<AttentionBackwardProblem>;
  constexpr std::int32_t kOffset = 0;
  AttentionBackwardProblem p;
  p.dtype = DType::bf16;
  EXPECT_EQ(Forward::missing(0, p), "");
  EXPECT_EQ(Backward::missing(0, p), "");
  const auto with = [&](const auto& change) {
    AttentionBackwardProblem changed = p;
    change(changed);
    return changed;
  };
  const auto piece = with([&](auto& x) { x.key_offset = {&kOffset, true}; });
  EXPECT_EQ(Forward::missing(kFloat32Out, piece), "it has no q_offset and key_offset");
  EXPECT_EQ(Backward::missing(kFloat32Out, piece), "it has no q_offset and key_offset");
  EXPECT_EQ(Forward::missing(kPiece, piece), "");
  const auto stepped = with([](auto& x) { x.key_step = 16, x.q_offset.given = true; });
  EXPECT_EQ(Forward::missing(kPiece, stepped), "it has no q_step and key_step above 1");
  EXPECT_EQ(Backward::missing(kPiece, stepped), "it has no q_step and key_step above 1");
  EXPECT_EQ(Forward::missing(kPiece | kSteps, stepped), "");
  const auto wide = with([](auto& x) { x.float32_out = true; });
  EXPECT_EQ(Forward::missing(kPiece, wide), "it does not take o in float32 beside q of bfloat16");
  EXPECT_EQ(Backward::missing(kPiece, wide), "it does not take o in float32 beside q of bfloat16");
  EXPECT_EQ(Forward::missing(kFloat32Out, wide), "");
  EXPECT_EQ(Forward::missing(0, with([](auto& x) { x.float32_out = true, x.dtype = DType::f32; })), "");
  const auto merged = with([](auto& x) { x.merged = true; });
  EXPECT_EQ(Backward::missing(0, merged), "it has no backward of a piece whose o and lse are merged");
  EXPECT_EQ(Backward::missing(kPiece, merged), "");
  const auto adds = with([](auto& x) { x.accumulate = true; });
  EXPECT_EQ(Backward::missing(kPiece, adds), "it does not add to dq, dk and dv");
  EXPECT_EQ(Backward::missing(kFloat32Gradients, adds), "");
  std::byte gradient{};
  const auto wide_dv = with([&](auto& x) { x.dv = {.data = &gradient, .dtype = DType::f32, .given = true}; });
  EXPECT_EQ(Backward::missing(kPiece, wide_dv), "it does not write gradients in float32 beside q of bfloat16");
  EXPECT_EQ(Backward::missing(kFloat32Gradients, wide_dv), "");
}

}  // namespace
}  // namespace heddle
