// What nsa_step refuses, in words, and what it would run on GPUs that need not be here.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "heddle/error.h"
#include "heddle/nsa.h"
#include "kernels/explained_on.h"

namespace heddle {
namespace {

using explained_on::view;

// A step that is right: B 2, H 8 over 2, D 64, Dv 128, a capacity of 300.
struct StepCall {
  TensorView q = view(DType::bf16, {2, 1, 8, 64}), k_new = view(DType::bf16, {2, 1, 2, 64}),
             v_new = view(DType::bf16, {2, 1, 2, 128}), out = view(DType::bf16, {2, 1, 8, 128});
  NsaCache cache{view(DType::bf16, {2, 300, 2, 64}), view(DType::bf16, {2, 300, 2, 128}),
                 view(DType::bf16, {2, 4, 2, 64}), view(DType::bf16, {2, 4, 2, 128}), view(DType::i32, {2})};
  NsaGates gates{view(DType::f32, {2, 1, 8}), view(DType::f32, {2, 1, 8}), view(DType::f32, {2, 1, 8})};
  NsaStepOptions options = {.scale = {}, .window = 100};

  std::vector<Candidate> on(const char* gpu) const {
    return explain_nsa_step_on(gpu_model_named(gpu), q, k_new, v_new, cache, gates, out, options);
  }
};

struct BadStep {
  const char* name;
  std::function<void(StepCall&)> spoil;
  const char* message;
};

class NsaStepRefuses : public ::testing::TestWithParam<BadStep> {};

TEST_P(NsaStepRefuses, InWords) {
  StepCall c;
  GetParam().spoil(c);
  try {
    c.on("h200");
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), std::string("[explain_nsa_step] ") + GetParam().message);
  }
}

const BadStep kBadSteps[] = {
    {"no_q", [](auto& c) { c.q = {}; }, "q is missing"},
    {"f32", [](auto& c) { c.q.dtype = DType::f32; }, "q is float32: a step takes float16 or bfloat16"},
    {"two_rows",
     [](auto& c) {
       c.q = view(DType::bf16, {2, 2, 8, 64});
     },
     "q is [2, 2, 8, 64]: a step has one row of each sequence"},
    {"heads",
     [](auto& c) {
       c.k_new = view(DType::bf16, {2, 1, 3, 64});
     },
     "q has 8 heads and k_new 3: the former must be a multiple of the latter"},
    {"k_new",
     [](auto& c) {
       c.k_new = view(DType::bf16, {2, 1, 2, 72});
     },
     "k_new is [2, 1, 2, 72]: its head size must be 64"},
    {"v",
     [](auto& c) {
       c.cache.v = view(DType::bf16, {2, 299, 2, 128});
     },
     "cache.v is [2, 299, 2, 128]: its rows must be 300"},
    {"pooled",
     [](auto& c) {
       c.cache.k_pooled = view(DType::bf16, {2, 5, 2, 64});
     },
     "cache.k_pooled is [2, 5, 2, 64]: its rows must be 4"},
    {"lengths", [](auto& c) { c.cache.lengths = view(DType::i32, {3}); },
     "cache.lengths has 3 entries: it must have 2"},
    {"gate",
     [](auto& c) {
       c.gates.slc = view(DType::f32, {2, 1, 2});
     },
     "g_slc is [2, 1, 2]: it must be [2, 1, 8], a number for each head of q"},
    {"gate_dtype", [](auto& c) { c.gates.cmp.dtype = DType::i32; },
     "g_cmp is int32: it must be float32, float16 or bfloat16"},
    {"no_g_slc", [](auto& c) { c.gates.slc = {}; }, "g_slc is missing"},
    {"no_g_swa", [](auto& c) { c.gates.swa = {}; }, "g_swa is missing: window is 100"},
    {"block", [](auto& c) { c.options.block_size = 48; }, "block_size is 48: it must be 16, 32, 64 or 128"},
    {"count", [](auto& c) { c.options.block_count = -1; }, "block_count is -1: it must be at least 0"},
    {"window", [](auto& c) { c.options.window = -1; }, "window is -1: it must be at least 0"},
};

INSTANTIATE_TEST_SUITE_P(Cases, NsaStepRefuses, ::testing::ValuesIn(kBadSteps),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(NsaStepExplained, SaysWhatItTakes) {
  if (!cuda::built()) GTEST_SKIP() << "this build has no GPU kernels";
  const auto reason = [](const std::function<void(StepCall&)>& change, const char* gpu = "h200") {
    StepCall c;
    change(c);
    return c.on(gpu).at(0).reason;
  };
  const std::vector<Candidate> list = StepCall().on("h200");
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0].name, "sm90");
  EXPECT_TRUE(list[0].chosen) << list[0].reason;
  EXPECT_EQ(list[0].workspace, 2u * 8 * 16 * 4);  // pooled keys, in whole tiles of 16
  EXPECT_NE(reason([](auto&) {}, "a100").find("it needs a Hopper GPU"), std::string::npos);
  EXPECT_EQ(reason([](auto& c) { c.options.block_count = 33; }), "it lists no more than 32 blocks, not 33");
  EXPECT_EQ(reason([](auto& c) {
              c.q = view(DType::bf16, {2, 1, 34, 64}), c.out = view(DType::bf16, {2, 1, 34, 128}),
              c.gates = {{}, view(DType::f32, {2, 1, 34}), view(DType::f32, {2, 1, 34})};
            }),
            "it has no more than 16 query heads to a key/value head, not 17");
  EXPECT_EQ(reason([](auto& c) {
              c.cache.k = view(DType::bf16, {2, 300, 2, 68});
              c.cache.k.shape[3] = 64;
            }),
            "cache.k must have contiguous rows at multiples of 16 bytes");
  // A cache without room for a block has no pooled keys.
  EXPECT_EQ(reason([](auto& c) {
              c.cache.k = view(DType::bf16, {2, 63, 2, 64}), c.cache.v = view(DType::bf16, {2, 63, 2, 128});
              c.cache.k_pooled = view(DType::bf16, {2, 0, 2, 64}), c.cache.v_pooled = view(DType::bf16, {2, 0, 2, 128});
            }),
            "");
}

}  // namespace
}  // namespace heddle
