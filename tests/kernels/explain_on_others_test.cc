// The candidates of a GPU that need not be here, of all but attention over floats.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/explained_on.h"

namespace heddle {
namespace {

using namespace explained_on;

TEST_F(ExplainOn, LinearLayersAndCachesInFourBits) {
  const TensorView x = view(DType::bf16, {64, 4096}), row = view(DType::bf16, {1, 4096});
  PackedWeights weights = packed_storage(lowbit::format_named("nvfp4"), 4096, 4096, false, WeightOrder::fragments16);
  const auto on = [&](const char* gpu, const TensorView& rows) {
    return explain_linear_on(gpu_model_named(gpu), rows, weights);
  };
  EXPECT_EQ(chosen(on("h100", x)), "sm90_w4a16");
  EXPECT_EQ(chosen(on("rtx4090", x)), "sm80_linear");
  EXPECT_EQ(chosen(on("a100", row)), "sm80_gemv");
  EXPECT_EQ(reason_of(on("a100", x), "sm90_w4a16"), "it needs a Hopper GPU (compute capability 9.0); this one has 8.0");
  for (const Candidate& candidate : on("h200", x)) EXPECT_TRUE(!candidate.supported || candidate.of_16bit > 0);

  // Whether this machine has cuBLASLt says nothing of that one's.
  LinearGradients gradients;
  gradients.dx = x;
  EXPECT_EQ(chosen(explain_linear_backward_on(gpu_model_named("a100"), x, {}, weights, gradients)), "cublaslt");

  const std::int64_t bytes = int4_cache_block_bytes(128, 128);
  Int4Cache cache;
  cache.blocks = view(DType::u8, {2, 100, 2, bytes});
  cache.k_tail = cache.v_tail = view(DType::bf16, {2, 128, 2, 128});
  AttentionOptions options;
  options.seqused_k = view(DType::i32, {2});
  const Call c{.Sq = 1};
  for (const char* gpu : {"a100", "h100"}) {
    EXPECT_EQ(chosen(explain_attention_over_int4_cache_on(gpu_model_named(gpu), c.q(), cache, options)), "sm80_decode");
  }
}

// One kernel each, which any GPU from Ampere on runs; that a GPU is not here costs no answer.
TEST_F(ExplainOn, CachesAndLowBitWeights) {
  const TensorView rows = view(DType::bf16, {2, 4, 2, 128}), seqlens = view(DType::i32, {2});
  const TensorView k = view(DType::bf16, {2, 64, 2, 128}), v = k;
  const Rotary rotary{.cos = view(DType::f32, {64, 64}), .sin = view(DType::f32, {64, 64})};
  Int4Cache cache;
  cache.blocks = view(DType::u8, {2, 1, 2, int4_cache_block_bytes(128, 128)});
  cache.k_tail = view(DType::bf16, {2, 128, 2, 128});
  cache.v_tail = cache.k_tail;
  const TensorView weights = view(DType::bf16, {64, 128});
  lowbit::QuantizedMatrix matrix = lowbit::storage(lowbit::format_named("nvfp4"), 64, 128);
  PackedWeights packed = packed_storage(matrix.format, 64, 128, false, WeightOrder::fragments16);
  const auto ask = [&](const GpuModel& gpu) {
    return std::vector{lowbit::explain_quantize_on(gpu, weights, {}, matrix),
                       explain_apply_rotary_on(gpu, rows, rows, rotary),
                       explain_append_kv_cache_on(gpu, rows, rows, k, v, seqlens, {.rotary = rotary}),
                       explain_append_int4_cache_on(gpu, rows, rows, cache, seqlens, {.rotary = rotary}),
                       lowbit::explain_dequantize_on(gpu, matrix, weights),
                       explain_unpack_weights_on(gpu, packed, weights)};
  };
  const auto on_ampere = ask(gpu_model_named("a100"));
  for (const auto& list : on_ampere) {
    EXPECT_EQ(chosen(list), "cuda");
    EXPECT_EQ(reason_of(list, "cpu"), "it runs on another device than the tensors are on");
    for (const Candidate& c : list) EXPECT_EQ(c.supported, c.seconds > 0 && !c.plan.empty()) << c.name;
  }
  EXPECT_EQ(on_ampere[0].back().workspace, 256);
  EXPECT_EQ(on_ampere[0].back().plan,
            "a team of threads for each group, after the matrix's own global scale; the host waits for what was found");
  const GpuModel turing{.name = "t4", .product = "Tesla T4", .major = 7, .minor = 5, .multiprocessors = 40};
  for (const auto& list : ask(turing)) {
    EXPECT_EQ(chosen(list), "none");
    EXPECT_EQ(reason_of(list, "cuda"),
              "it needs an Ampere GPU or a newer one (compute capability 8.0); this one has 7.5");
  }
}

}  // namespace
}  // namespace heddle
