// Which candidate a call gets by itself: where the wrong one would be several times slower, and where it may not follow
// from a row's neighbours. Only extents are looked at.
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

// What is chosen for sequences of one batch, or for packed ones of which max_q and max_k are the longest.
struct Extents {
  std::int64_t B, H, Hkv, Sq, Sk, D;
  bool packed = false, batch_invariant = false;
  Causal causal = Causal::bottom_right;
};

std::string chosen(const Extents& x, Pass pass) {
  alignas(16) static std::byte somewhere[16];
  const auto view = [](DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView t(somewhere, dtype, shape);
    t.device = Device::cuda;
    return t;
  };
  AttentionOptions options;
  options.causal = x.causal;
  options.batch_invariant = x.batch_invariant;
  TensorView q = view(DType::bf16, {x.B, x.Sq, x.H, x.D}), k = view(DType::bf16, {x.B, x.Sk, x.Hkv, x.D});
  if (x.packed) {
    q = view(DType::bf16, {x.B * x.Sq, x.H, x.D});
    k = view(DType::bf16, {x.B * x.Sk, x.Hkv, x.D});
    options.cu_seqlens_q = options.cu_seqlens_k = view(DType::i32, {x.B + 1});
    options.max_seqlen_q = x.Sq;
    options.max_seqlen_k = x.Sk;
  }
  for (const Candidate& c : explain_attention(q, k, k, options, pass)) {
    if (c.chosen) return c.name;
  }
  return "none";
}

constexpr std::int64_t kSizes[] = {64, 128, 256}, kHeads[] = {1, 4}, kKeys[] = {256, 2048, 16384};

// Calls without batch_invariant: decode's choice may follow from the batch, a prefill's and a backward's may not.
TEST(GpuChoice, APrefillDoesNotSeeItsBatch) {
  for (const std::int64_t D : kSizes) {
    for (const std::int64_t Hkv : kHeads) {
      for (const std::int64_t Sk : kKeys) {
        for (const std::int64_t Sq : {17, 32, 64, 65, 128, 256}) {
          for (const Pass pass : {Pass::forward, Pass::backward}) {
            const std::string alone = chosen({1, 4, Hkv, Sq, Sk, D}, pass);
            for (const std::int64_t B : {2, 16, 300}) {
              EXPECT_EQ(chosen({B, 4, Hkv, Sq, Sk, D}, pass), alone)
                  << "B " << B << ", kv heads " << Hkv << ", rows " << Sq << ", keys " << Sk << ", head size " << D;
            }
          }
        }
      }
    }
  }
}

TEST(GpuChoice, APackedPrefillDoesNotSeeTheLongestSequence) {
  for (const std::int64_t D : kSizes) {
    for (const std::int64_t Hkv : kHeads) {
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        const std::string alone = chosen({1, 4, Hkv, 17, 17, D, true}, pass);
        for (const std::int64_t longest : {64, 128, 300, 1024, 5000}) {
          EXPECT_EQ(chosen({3, 4, Hkv, longest, longest, D, true}, pass), alone)
              << "longest " << longest << ", kv heads " << Hkv << ", head size " << D;
        }
      }
    }
  }
}

TEST(GpuChoice, BatchInvariantDecodeDoesNotSeeItsBatch) {
  for (const std::int64_t D : kSizes) {
    for (const std::int64_t Hkv : kHeads) {
      for (const std::int64_t Sk : kKeys) {
        for (const std::int64_t Sq : {1, 4, 16}) {
          const std::string alone = chosen({1, 4, Hkv, Sq, Sk, D, false, true}, Pass::forward);
          for (const std::int64_t B : {2, 16, 300}) {
            EXPECT_EQ(chosen({B, 4, Hkv, Sq, Sk, D, false, true}, Pass::forward), alone)
                << "B " << B << ", kv heads " << Hkv << ", rows " << Sq << ", keys " << Sk << ", head size " << D;
          }
        }
      }
      const std::string alone = chosen({1, 4, Hkv, 1, 300, D, true, true}, Pass::forward);
      for (const std::int64_t longest : {4, 16, 17, 1024}) {
        EXPECT_EQ(chosen({3, 4, Hkv, longest, longest, D, true, true}, Pass::forward), alone)
            << "longest " << longest << ", kv heads " << Hkv << ", head size " << D;
      }
    }
  }
}

}  // namespace
}  // namespace heddle::kit
