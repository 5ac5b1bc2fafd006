// Which candidate a call gets on a GPU may not follow from a row's neighbours, as two candidates have different bits.
// On both sides of where the fastest one changes, by length and by the work of a batch; only extents are looked at.
#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include "cuda/backend.h"
#include "heddle/explain.h"

namespace heddle::kit {
namespace {

// What is chosen for sequences of one batch, or for packed ones of which max_q and max_k are the longest.
struct Extents {
  std::int64_t B, H, Hkv, Sq, Sk, D;
  bool packed = false, batch_invariant = false;
  Causal causal = Causal::bottom_right;
};

std::string chosen(const GpuModel& gpu, const Extents& x, Pass pass) {
  const auto view = [](DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView t(nullptr, dtype, shape);
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
  for (const Candidate& c : pass == Pass::forward ? explain_attention_on(gpu, q, k, k, options)
                                                  : explain_attention_backward_on(gpu, q, k, k, {}, options)) {
    if (c.chosen) return c.name;
  }
  return "none";
}

class GpuChoice : public ::testing::TestWithParam<GpuModel> {
 protected:
  void SetUp() override {
    if (!cuda::built()) GTEST_SKIP() << "a build without CUDA has no kernels to ask";
  }
  static std::string chosen(const Extents& x, Pass pass) { return kit::chosen(GetParam(), x, pass); }
};

constexpr std::int64_t kSizes[] = {64, 128, 256}, kHeads[] = {1, 4}, kKeys[] = {256, 2048, 16384};

// Calls without batch_invariant: decode's choice may follow from the batch, a prefill's and a backward's may not.
TEST_P(GpuChoice, APrefillDoesNotSeeItsBatch) {
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

TEST_P(GpuChoice, APackedPrefillDoesNotSeeTheLongestSequence) {
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

TEST_P(GpuChoice, BatchInvariantDecodeDoesNotSeeItsBatch) {
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

TEST_P(GpuChoice, EveryCallIsServed) {
  for (const std::int64_t Sq : {1, 17, 4096}) EXPECT_NE(chosen({2, 4, 4, Sq, 4096, 128}, Pass::forward), "none");
}

INSTANTIATE_TEST_SUITE_P(Models, GpuChoice, ::testing::ValuesIn(gpu_models()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace heddle::kit
