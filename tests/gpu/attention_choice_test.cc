// Which candidate a call gets by itself, where the wrong one would be several times slower. Only extents are looked at.
#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "heddle/attention.h"

namespace heddle::kit {
namespace {

struct Call {
  std::int64_t B, H, Hkv, Sq, Sk, D, page;  // page: 0 for a contiguous cache
};

// The candidate that is chosen, and the first of `expected` that this GPU has.
struct Choice {
  std::string chosen, expected;
};

Choice choice(const Call& c, std::initializer_list<const char*> expected) {
  const auto view = [](DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView x(nullptr, dtype, shape);
    x.device = Device::cuda;
    return x;
  };
  AttentionOptions options;
  options.causal = Causal::bottom_right;
  TensorView k = view(DType::bf16, {c.B, c.Sk, c.Hkv, c.D});
  if (c.page > 0) {
    k = view(DType::bf16, {c.B * c.Sk / c.page, c.page, c.Hkv, c.D});
    options.page_table = view(DType::i32, {c.B, c.Sk / c.page});
  }
  const std::vector<Candidate> all = explain_attention(view(DType::bf16, {c.B, c.Sq, c.H, c.D}), k, k, options);
  Choice out;
  for (const char* name : expected) {
    for (const Candidate& candidate : all) {
      if (candidate.chosen) out.chosen = candidate.name;
      if (out.expected.empty() && candidate.supported && candidate.name == name) out.expected = name;
    }
  }
  return out;
}

TEST(GpuChoice, DecodeIsForDecodeKernels) {
  for (const Call& c :
       {Call{1, 32, 8, 1, 1024, 128, 0}, Call{1, 32, 8, 1, 32768, 128, 0}, Call{64, 32, 8, 1, 8192, 128, 0},
        Call{64, 32, 8, 4, 8192, 128, 0}, Call{64, 32, 8, 1, 8192, 128, 16}, Call{1, 8, 8, 1, 4096, 64, 0}}) {
    const Choice found = choice(c, {"sm90_decode", "sm80_decode"});
    ASSERT_NE(found.expected, "");
    EXPECT_EQ(found.chosen, found.expected)
        << "B " << c.B << ", keys " << c.Sk << ", rows " << c.Sq << ", pages of " << c.page;
  }
}

TEST(GpuChoice, LongQueriesAreNot) {
  for (const Call& c : {Call{2, 16, 16, 4096, 4096, 128, 0}, Call{1, 4, 4, 256, 256, 64, 0}}) {
    const Choice found = choice(c, {"sm90", "sm80"});
    ASSERT_NE(found.expected, "");
    EXPECT_EQ(found.chosen, found.expected) << "B " << c.B << ", keys " << c.Sk << ", rows " << c.Sq;
  }
}

}  // namespace
}  // namespace heddle::kit
