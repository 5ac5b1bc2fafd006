// Which candidate a call gets by itself, where the wrong one would be several times slower. Only extents are looked at.
#include <gtest/gtest.h>

#include "cuda/common/device.h"
#include "heddle/attention.h"

namespace heddle::kit {
namespace {

struct Call {
  std::int64_t B, H, Hkv, Sq, Sk, D, page;  // page: 0 for a contiguous cache
};

std::string chosen(const Call& c) {
  alignas(16) static std::byte somewhere[16];
  const auto view = [](DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView x(somewhere, dtype, shape);
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
  for (const Candidate& candidate : explain_attention(view(DType::bf16, {c.B, c.Sq, c.H, c.D}), k, k, options)) {
    if (candidate.chosen) return candidate.name;
  }
  return "none";
}

TEST(GpuChoice, DecodeIsForDecodeKernels) {
  const std::string decode = cuda::current_device().major == 9 ? "sm90_decode" : "sm80_decode";
  for (const Call& c :
       {Call{1, 32, 8, 1, 1024, 128, 0}, Call{1, 32, 8, 1, 32768, 128, 0}, Call{64, 32, 8, 1, 8192, 128, 0},
        Call{64, 32, 8, 4, 8192, 128, 0}, Call{64, 32, 8, 1, 8192, 128, 16}, Call{1, 8, 8, 1, 4096, 64, 0}}) {
    EXPECT_EQ(chosen(c), decode) << "B " << c.B << ", keys " << c.Sk << ", rows " << c.Sq << ", pages of " << c.page;
  }
}

TEST(GpuChoice, LongQueriesAreNot) {
  const std::string forward = cuda::current_device().major == 9 ? "sm90" : "sm80";
  for (const Call& c : {Call{2, 16, 16, 4096, 4096, 128, 0}, Call{1, 4, 4, 256, 256, 64, 0}}) {
    EXPECT_EQ(chosen(c), forward) << "B " << c.B << ", keys " << c.Sk << ", rows " << c.Sq;
  }
}

}  // namespace
}  // namespace heddle::kit
