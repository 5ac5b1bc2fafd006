// Which candidate a call gets on a GPU may not follow from a row's neighbours, as two candidates have different bits.
// On both sides of where the fastest one changes, by length and by the work of a batch; only extents are looked at.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
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
  DType dtype = DType::bf16;
  Causal causal = Causal::bottom_right;
};

// A plan without what it counts, as tiles and who takes them: what is left are the tiles' sizes and what they are for.
// Which heads share a tile, and at head sizes to 64 the tile, may follow from the longest of packed sequences: bits are
// the same (docs/numerics.md).
std::string without_counts(const std::string& plan, const Extents& x) {
  if (x.packed && x.D <= 64) return "";
  std::string out;
  for (std::size_t begin = 0; begin < plan.size();) {
    const std::size_t end = std::min(plan.find(", ", begin), plan.size());
    const std::string piece = plan.substr(begin, end - begin);
    const bool counts = std::isdigit(static_cast<unsigned char>(piece[0])) != 0;
    if (!counts || (!x.packed && piece.ends_with("heads in a tile"))) out += piece + "; ";
    begin = end + 2;
  }
  return out;
}

// The candidate, and its plan without counts.
std::string chosen(const GpuModel& gpu, const Extents& x, Pass pass) {
  const auto view = [](DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView t(nullptr, dtype, shape);
    t.device = Device::cuda;
    return t;
  };
  AttentionOptions options;
  options.causal = x.causal;
  options.batch_invariant = x.batch_invariant;
  TensorView q = view(x.dtype, {x.B, x.Sq, x.H, x.D}), k = view(x.dtype, {x.B, x.Sk, x.Hkv, x.D});
  if (x.packed) {
    q = view(x.dtype, {x.B * x.Sq, x.H, x.D});
    k = view(x.dtype, {x.B * x.Sk, x.Hkv, x.D});
    options.cu_seqlens_q = options.cu_seqlens_k = view(DType::i32, {x.B + 1});
    options.max_seqlen_q = x.Sq;
    options.max_seqlen_k = x.Sk;
  }
  for (const Candidate& c : pass == Pass::forward ? explain_attention_on(gpu, q, k, k, options)
                                                  : explain_attention_backward_on(gpu, q, k, k, {}, options)) {
    if (c.chosen) return c.name + ": " + without_counts(c.plan, x);
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

constexpr DType kTypes[] = {DType::f16, DType::bf16, DType::f32, DType::f8e4m3};
constexpr std::int64_t kSizes[] = {64, 128, 256}, kHeads[] = {1, 4}, kKeys[] = {256, 2048, 16384};

// Head sizes and passes with that dtype.
bool is_served(DType dtype, std::int64_t D, Pass pass) {
  return dtype != DType::f8e4m3 || (D <= 128 && pass == Pass::forward);
}

// Calls without batch_invariant: decode's choice may follow from the batch, a prefill's and a backward's may not.
void expect_a_prefill_not_to_see_its_batch(const GpuModel& gpu, DType dtype, std::int64_t D, Pass pass) {
  for (const std::int64_t Hkv : kHeads) {
    for (const std::int64_t Sk : kKeys) {
      for (const std::int64_t Sq : {17, 32, 64, 65, 128, 256}) {
        Extents x{.B = 1, .H = 4, .Hkv = Hkv, .Sq = Sq, .Sk = Sk, .D = D, .dtype = dtype};
        const std::string alone = chosen(gpu, x, pass);
        for (const std::int64_t B : {2, 16, 300}) {
          x.B = B;
          EXPECT_EQ(chosen(gpu, x, pass), alone)
              << "B " << B << ", kv heads " << Hkv << ", rows " << Sq << ", keys " << Sk;
        }
      }
    }
  }
}

TEST_P(GpuChoice, APrefillDoesNotSeeItsBatch) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t D : kSizes) {
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        if (!is_served(dtype, D, pass)) continue;
        SCOPED_TRACE(std::string(name_of(dtype)) + ", head size " + std::to_string(D));
        expect_a_prefill_not_to_see_its_batch(GetParam(), dtype, D, pass);
      }
    }
  }
}

TEST_P(GpuChoice, APackedPrefillDoesNotSeeTheLongestSequence) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t D : kSizes) {
      for (const std::int64_t Hkv : kHeads) {
        for (const Pass pass : {Pass::forward, Pass::backward}) {
          if (!is_served(dtype, D, pass)) continue;
          Extents x{.B = 1, .H = 4, .Hkv = Hkv, .Sq = 17, .Sk = 17, .D = D, .packed = true, .dtype = dtype};
          const std::string alone = chosen(x, pass);
          x.B = 3;
          for (const std::int64_t longest : {64, 128, 300, 1024, 5000}) {
            x.Sq = x.Sk = longest;
            EXPECT_EQ(chosen(x, pass), alone)
                << name_of(dtype) << ", longest " << longest << ", kv heads " << Hkv << ", head size " << D;
          }
        }
      }
    }
  }
}

TEST_P(GpuChoice, BatchInvariantDecodeDoesNotSeeItsBatch) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const std::int64_t D : kSizes) {
      for (const std::int64_t Hkv : kHeads) {
        Extents x{.B = 1, .H = 4, .Hkv = Hkv, .Sq = 1, .Sk = 1, .D = D, .batch_invariant = true, .dtype = dtype};
        for (const std::int64_t Sk : kKeys) {
          for (const std::int64_t Sq : {1, 4, 16}) {
            x.B = 1, x.Sq = Sq, x.Sk = Sk;
            const std::string alone = chosen(x, Pass::forward);
            for (const std::int64_t B : {2, 16, 300}) {
              x.B = B;
              EXPECT_EQ(chosen(x, Pass::forward), alone) << name_of(dtype) << ", B " << B << ", kv heads " << Hkv
                                                         << ", rows " << Sq << ", keys " << Sk << ", head size " << D;
            }
          }
        }
        x.B = 1, x.Sq = 1, x.Sk = 300, x.packed = true;
        const std::string alone = chosen(x, Pass::forward);
        x.B = 3;
        for (const std::int64_t longest : {4, 16, 17, 1024}) {
          x.Sq = x.Sk = longest;
          EXPECT_EQ(chosen(x, Pass::forward), alone)
              << name_of(dtype) << ", longest " << longest << ", kv heads " << Hkv << ", head size " << D;
        }
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
