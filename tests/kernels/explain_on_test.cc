// What would run on a GPU that is not here, and that nothing else comes to believe in it.
#include "heddle/explain.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "cuda/assumed_gpu.h"
#include "cuda/backend.h"
#include "heddle/error.h"
#include "kernels/explained_on.h"

namespace heddle {
namespace {

using namespace explained_on;

// What the GPU's candidates say of tensors on the GPU that there is, if any.
std::vector<std::string> answers_here() {
  const Call c{.device = Device::cuda};
  std::vector<std::string> out;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const Candidate& candidate : pass == Pass::forward
                                          ? explain_attention(c.q(), c.k(), c.k(), c.options)
                                          : explain_attention_backward(c.q(), c.k(), c.k(), {}, c.options)) {
      out.push_back(candidate.name + ": " + candidate.reason + (candidate.chosen ? "chosen" : ""));
    }
  }
  return out;
}

bool is_decode(const Candidate& candidate) { return candidate.name.ends_with("_decode"); }

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(GpuModels, HaveNames) {
  for (const GpuModel& model : gpu_models()) EXPECT_EQ(&gpu_model_named(model.name), &model);
  EXPECT_EQ(refusal([] { gpu_model_named("v100"); }),
            "[explain] gpu is 'v100': it must be one of a100, rtx4090, l40s, h100, h200");
}

TEST(GpuModels, WithoutKernelsTheirCandidatesSaySo) {
  if (cuda::built()) GTEST_SKIP() << "this build has kernels";
  const Call c;
  const auto list = explain_attention_on(gpu_model_named("h100"), c.q(), c.k(), c.k(), c.options);
  EXPECT_EQ(chosen(list), "none");
  EXPECT_EQ(reason_of(list, "sm90"), "this heddle was built without CUDA: build it with HEDDLE_CUDA=ON");
}

TEST_F(ExplainOn, EachArchitectureHasItsOwn) {
  const Call prefill, decode{.Sq = 1, .Sk = 8192}, f32{.dtype = DType::f32};
  for (const char* gpu : {"a100", "rtx4090", "l40s"}) {
    EXPECT_EQ(chosen_on(gpu, prefill), "sm80") << gpu;
    EXPECT_EQ(chosen_on(gpu, prefill, Pass::backward), "sm80") << gpu;
    EXPECT_EQ(chosen_on(gpu, decode), "sm80_decode") << gpu;
  }
  for (const char* gpu : {"h100", "h200"}) {
    EXPECT_EQ(chosen_on(gpu, prefill), "sm90") << gpu;
    EXPECT_EQ(chosen_on(gpu, prefill, Pass::backward), "sm90") << gpu;
    EXPECT_EQ(chosen_on(gpu, decode), "sm90_decode") << gpu;
    EXPECT_EQ(chosen_on(gpu, f32), "sm80") << gpu;
  }
  const auto ada = explain_attention_on(gpu_model_named("rtx4090"), prefill.q(), prefill.k(), prefill.k(), {});
  EXPECT_EQ(reason_of(ada, "sm90"), "it needs a Hopper GPU (compute capability 9.0); this one has 8.9");
  EXPECT_EQ(reason_of(ada, "cpu"), "it runs on another device than the tensors are on");
}

TEST_F(ExplainOn, TakesAModelOfTheCallers) {
  const Call c;
  const GpuModel turing{.name = "t4", .product = "Tesla T4", .major = 7, .minor = 5, .multiprocessors = 40};
  const auto list = explain_attention_on(turing, c.q(), c.k(), c.k(), {});
  EXPECT_EQ(chosen(list), "none");
  EXPECT_EQ(reason_of(list, "sm80"),
            "it needs an Ampere GPU or a newer one (compute capability 8.0); this one has 7.5");
}

// What a call of q [2, 1024, 8, 128] and two kv heads would run, to the letter: a change of plans is seen here.
TEST_F(ExplainOn, PlansInWords) {
  const auto plan = [](const char* gpu, const Call& c, Pass pass = Pass::forward) {
    for (const Candidate& candidate :
         pass == Pass::forward
             ? explain_attention_on(gpu_model_named(gpu), c.q(), c.k(), c.k(), c.options)
             : explain_attention_backward_on(gpu_model_named(gpu), c.q(), c.k(), c.k(), {}, c.options)) {
      if (candidate.chosen) return candidate.name + ": " + candidate.plan;
    }
    return std::string();
  };
  Call c;
  EXPECT_EQ(plan("h200", c), "sm90: d128: tiles of 128 rows x 128 keys, 128 tiles on 132 multiprocessors");
  EXPECT_EQ(plan("h200", c, Pass::backward),
            "sm90: d128: tiles of 64 rows x 128 keys, 4 CTAs share the heads of a kv head, 128 tiles of keys");
  EXPECT_EQ(plan("a100", c), "sm80: d128: tiles of 128 rows, without score options, 128 tiles");
  EXPECT_EQ(plan("a100", c, Pass::backward),
            "sm80: d128: tiles of 64 rows x 64 keys, without score options, 82944 bytes of shared memory, "
            "256 tiles of keys");
  const Call decode{.Sq = 1, .Sk = 8192};
  EXPECT_EQ(plan("h200", decode),
            "sm90_decode: d128: products by warps, blocks of 128 keys of a kv head with 4 rows, 5 stages, "
            "44 CTAs in clusters of 11 that share the keys");
  EXPECT_EQ(plan("a100", decode), "sm80_decode: d128: tiles of 16 rows, cells of 64 keys, 108 CTAs, keys split evenly");
  c.options.softcap = 20;
  c.options.alibi_slopes = view(DType::f32, {8});
  EXPECT_EQ(plan("h200", c),
            "sm90: d128 options: tiles of 128 rows x 128 keys, with all score options, 128 tiles on 132 "
            "multiprocessors");
  c.options.softcap = 0;
  EXPECT_EQ(plan("h200", c),
            "sm90: d128 keys: tiles of 128 rows x 128 keys, with ALiBi in the product and bias or mask by keys "
            "in the product, 128 tiles on 132 multiprocessors");
}

// Lists of one length, or one behind the other, of two kv heads: which way is taken, and what is not.
TEST_F(ExplainOn, ListsByOffsets) {
  const auto on = [](std::int64_t rows, std::int64_t keys, const BlockLists& lists, Pass pass = Pass::forward) {
    const TensorView q = view(DType::bf16, {1, rows, 32, 128}), k = view(DType::bf16, {1, keys, 2, 128});
    const GpuModel& gpu = gpu_model_named("h100");
    return pass == Pass::forward ? explain_sparse_attention_on(gpu, q, k, k, lists, {})
                                 : explain_sparse_attention_backward_on(gpu, q, k, k, lists, {}, {});
  };
  const auto plan = [](const std::vector<Candidate>& list, const std::string& name) {
    for (const Candidate& candidate : list) {
      if (candidate.name == name) return candidate.supported ? candidate.plan : candidate.reason;
    }
    return std::string("there is no such candidate");
  };
  const auto by_offsets = [](std::int64_t entries, std::int64_t lists, std::int64_t query_rows = 1,
                             std::int64_t block_size = 64) {
    return BlockLists{.blocks = view(DType::i32, {entries}),
                      .counts = {},
                      .offsets = view(DType::i32, {1, 2, lists + 1}),
                      .block_size = block_size,
                      .query_rows = query_rows};
  };
  constexpr std::int64_t kRows = 8192;
  BlockLists padded{.blocks = view(DType::i32, {1, kRows, 2, 16}), .counts = {}, .offsets = {}};
  EXPECT_TRUE(plan(on(kRows, kRows, padded), "sm90").starts_with("16 neighbouring lists together"));
  padded.blocks = view(DType::i32, {1, kRows, 2, 1025});
  EXPECT_EQ(plan(on(kRows, kRows, padded), "sm90"),
            "lists must have no more than 1024 entries, not 1025; longer ones are taken one behind the other, by "
            "offsets");

  const BlockLists csr = by_offsets(2 * kRows * 16, kRows);
  for (const char* candidate : {"sm90", "sm80"}) {
    EXPECT_EQ(
        plan(on(kRows, kRows, csr), candidate),
        "by blocks of 64 keys, 64 at a time: rows that name one in tiles of 128, lists of up to 226719 entries at "
        "a time, partial results of 16 rows in float16 joined in the order of slots");
  }
  EXPECT_EQ(plan(on(kRows, kRows, csr, Pass::backward), "sm80"),
            "by blocks of 64 keys, 64 at a time: rows that name one, lists of up to 368055 entries at a time, partial "
            "results of dq of 16 rows in float16 joined in the order of slots, dk and dv in that of lists");
  // A list may have as many entries as there are, of which no more say something than a sequence has blocks.
  EXPECT_EQ(plan(on(kRows, 1 << 20, by_offsets(1 << 30, kRows)), "sm80").substr(0, 9), "by blocks");
  EXPECT_EQ(plan(on(kRows, kRows, by_offsets(1 << 30, kRows / 4, 4)), "sm90"),
            "by rows: tiles of 64 of the 64 that share a list by 64 keys");
  EXPECT_EQ(plan(on(kRows, 16 * 32769, by_offsets(1 << 20, kRows / 4, 4, 16)), "sm90"),
            "lists by offsets of 64 rows each name no more than 32768 blocks of keys, not 32769");
  EXPECT_EQ(plan(on(kRows, 16 * 32768, by_offsets(1 << 20, kRows / 4, 4, 16)), "sm90"),
            "by rows: tiles of 64 of the 64 that share a list by 64 keys");
}

// A launch has at most 2^30 blocks: of one sequence more the kernels say so, instead of counting past what int holds.
TEST_F(ExplainOn, MoreTilesThanALaunchHas) {
  struct Limit {
    const char* candidate;
    Pass pass;
    DType dtype;
    std::int64_t most;  // sequences of 1024 heads of 64 rows and keys
    const char* words;
  };
  constexpr DType bf16 = DType::bf16, f32 = DType::f32, e4m3 = DType::f8e4m3;
  constexpr std::int64_t kAll = 1 << 20;  // of one tile for each head
  for (const Limit& x : {Limit{"sm90", Pass::forward, bf16, kAll, "q has more tiles of 128 rows than 1073741824"},
                         Limit{"sm90_fp8", Pass::forward, e4m3, kAll, "q has more tiles of 128 rows than 1073741824"},
                         Limit{"sm90", Pass::backward, bf16, kAll, "q or k have more tiles than 1073741824"},
                         Limit{"sm80", Pass::forward, bf16, kAll, "q has more tiles of 128 rows than 2^30"},
                         Limit{"sm80", Pass::forward, f32, kAll, "q has more tiles of 128 rows than 2^30"},
                         Limit{"sm80", Pass::backward, bf16, kAll / 4, "q or k have more tiles than 2^30"},
                         Limit{"sm80", Pass::backward, f32, kAll / 4, "q or k have more tiles than 2^30"}}) {
    SCOPED_TRACE(std::string(x.candidate) + (x.pass == Pass::forward ? ", " : " backward, ") + name_of(x.dtype));
    const auto answer = [&](std::int64_t sequences) {
      const TensorView q = view(x.dtype, {sequences, 64, 1024, 64});
      const GpuModel& gpu = gpu_model_named("h100");
      return reason_of(x.pass == Pass::forward ? explain_attention_on(gpu, q, q, q, {})
                                               : explain_attention_backward_on(gpu, q, q, q, {}, {}),
                       x.candidate);
    };
    EXPECT_EQ(answer(x.most), "");
    EXPECT_EQ(answer(x.most + 1), x.words);
    EXPECT_EQ(answer(std::numeric_limits<std::int32_t>::max()), x.words);
  }
}

// Nothing of the options is left on the CPU, and none of it is read: the addresses are of 64 bytes.
TEST_F(ExplainOn, OptionsAreThereToo) {
  Call c{.Sq = 4, .Sk = 16};
  c.options.alibi_slopes = c.options.sink = view(DType::f32, {8});
  c.options.bias = view(DType::f32, {1, 8, 4, 1 << 20});
  c.options.mask = view(DType::boolean, {2, 1, 4, 1 << 20});
  c.options.page_table = view(DType::i32, {2, 1 << 16});
  c.options.seqused_q = c.options.seqused_k = c.options.cache_leftpad = view(DType::i32, {2});
  c.options.draft_mask = view(DType::i32, {2, 4});
  EXPECT_EQ(chosen_on("h100", c), "sm90_decode");
  EXPECT_EQ(chosen_on("a100", c), "sm80_decode");

  Call packed;
  packed.options.cu_seqlens_q = packed.options.cu_seqlens_k = view(DType::i32, {1 << 20});
  const auto ask = [&] {
    explain_attention_on(gpu_model_named("h100"), view(DType::bf16, {1 << 20, 8, 128}),
                         view(DType::bf16, {1 << 20, 2, 128}), view(DType::bf16, {1 << 20, 2, 128}), packed.options);
  };
  EXPECT_EQ(
      refusal(ask),
      "[explain_attention] max_seqlen_q is 0: cu_seqlens_q is on a GPU, where lengths are not read, so an upper bound "
      "must be given");
  packed.options.max_seqlen_q = packed.options.max_seqlen_k = 512;
  EXPECT_EQ(refusal(ask), "nothing was refused");
}

TEST_F(ExplainOn, IsForgottenAfterTheCall) {
  const std::vector<std::string> before = answers_here();
  const Call c;
  EXPECT_EQ(chosen_on("h100", c), "sm90");
  EXPECT_FALSE(cuda::gpu_is_assumed());
  EXPECT_EQ(answers_here(), before);
  // Also when the call is refused.
  EXPECT_THROW(explain_attention_on(gpu_model_named("h100"), c.q(), view(DType::f16, {2, 8, 2, 128}), c.k(), {}),
               Error);
  EXPECT_FALSE(cuda::gpu_is_assumed());
  EXPECT_EQ(answers_here(), before);
}

TEST_F(ExplainOn, IsNotSeenByOtherThreads) {
  const std::vector<std::string> before = answers_here();
  // Of the GPU that is here, if there is one, nothing else is said when it is assumed.
  const bool hopper_here = [&] {
    const cuda::AssumedGpu assumed(gpu_model_named("h100"));
    return answers_here() == before;
  }();
  const cuda::AssumedGpu assumed(gpu_model_named(hopper_here ? "a100" : "h100"));
  EXPECT_NE(answers_here(), before);
  std::vector<std::string> meanwhile;
  bool seen = true;
  std::thread([&] {
    seen = cuda::gpu_is_assumed();
    meanwhile = answers_here();
  }).join();
  EXPECT_FALSE(seen);
  EXPECT_EQ(meanwhile, before);
}

TEST_F(ExplainOn, NothingCanBeStarted) {
  const cuda::AssumedGpu assumed(gpu_model_named("h100"));
  const std::string words = "] nothing runs on a GPU that is only assumed: NVIDIA H100 80GB HBM3";
  Call c{.Sq = 16, .Sk = 16, .device = Device::cuda};
  WorkspaceBuffer memory, scratch;
  std::size_t used = 0;
  const auto apart = [&](TensorView x) {
    constexpr std::size_t kEach = std::size_t{1} << 16;
    x.data = static_cast<std::byte*>(memory.get(32 * kEach).data) + kEach * used++;
    return x;
  };
  const Runtime runtime{.workspace = scratch.get(std::size_t{256} << 20)};
  const TensorView q = apart(c.q()), k = apart(c.k()), v = apart(c.k()), o = apart(c.q()), d_o = apart(c.q());
  const TensorView lse = apart(view(DType::f32, {2, 8, 16}, Device::cuda));
  for (const char* name : {"sm90", "sm80", "sm90_decode", "sm80_decode", "naive_cuda", "baseline_cuda"}) {
    c.options.force = name;
    EXPECT_EQ(refusal([&] { attention_forward(q, k, v, o, lse, c.options, runtime); }), "[attention_forward" + words)
        << name;
  }
  AttentionGradients gradients;
  gradients.dq = apart(c.q());
  gradients.dk = apart(c.k());
  gradients.dv = apart(c.k());
  EXPECT_EQ(refusal([&] { attention_backward(q, k, v, o, lse, d_o, {}, gradients, {}, runtime); }),
            "[attention_backward" + words);

  const TensorView x = apart(view(DType::bf16, {1, 128}, Device::cuda)), y = apart(x);
  PackedWeights weights = packed_storage(lowbit::format_named("nvfp4"), 128, 128, false, WeightOrder::fragments16);
  weights.data = apart(weights.data);
  weights.device = weights.data.device = Device::cuda;
  EXPECT_EQ(refusal([&] { linear_forward(x, weights, y, {}, runtime); }), "[linear_forward" + words);
  LinearGradients dx;
  dx.dx = x;
  EXPECT_EQ(refusal([&] { linear_backward(y, {}, weights, dx, {}, runtime); }), "[linear_backward" + words);

  const TensorView cos = apart(view(DType::f32, {64, 64}, Device::cuda)), sin = apart(cos);
  EXPECT_EQ(refusal([&] { apply_rotary(q, q, {.cos = cos, .sin = sin}, {}, runtime); }), "[apply_rotary" + words);
  const TensorView seqlens = apart(view(DType::i32, {2}, Device::cuda));
  EXPECT_EQ(refusal([&] { append_kv_cache(k, v, apart(k), apart(v), seqlens, {}, runtime); }),
            "[append_kv_cache" + words);
}

// Positions of its own, and an o in float32, have on GPUs sm80 and sm90, whose forward has the latter beside the former
// alone, of few rows decode kernels, and what runs when it is asked for; the others say so.
TEST_F(ExplainOn, PiecesAreServedByFewKernels) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    Call piece, wide;
    piece.options.q_offset = view(DType::i32, {2});
    wide.options.float32_out = true;
    for (const auto& [c, words] : {std::pair{piece, "it has no q_offset and key_offset"},
                                   std::pair{wide, "it does not take o in float32 beside q of bfloat16"}}) {
      int asked = 0;
      const GpuModel& gpu = gpu_model_named("h100");
      for (const Candidate& candidate : pass == Pass::forward
                                            ? explain_attention_on(gpu, c.q(), c.k(), c.k(), c.options)
                                            : explain_attention_backward_on(gpu, c.q(), c.k(), c.k(), {}, c.options)) {
        if (candidate.device != Device::cuda || is_decode(candidate)) continue;
        const bool plain = candidate.name == "naive_cuda" || candidate.name == "baseline_cuda";
        const bool of_hopper = candidate.name == "sm90", wide_forward = pass == Pass::forward && c.options.float32_out;
        const bool serves = candidate.name == "sm80" || (of_hopper && !wide_forward);
        EXPECT_EQ(candidate.reason, serves      ? ""
                                    : plain     ? "it runs only when it is asked for"
                                    : of_hopper ? "it has no o in float32 without q_offset or key_offset"
                                                : words)
            << candidate.name;
        EXPECT_EQ(candidate.supported, plain || serves) << candidate.name;
        EXPECT_EQ(candidate.chosen, serves && of_hopper != wide_forward) << candidate.name;
        ++asked;
      }
      EXPECT_GT(asked, 0);
    }
  }
}

TEST_F(ExplainOn, StepsAreServedByFewKernels) {
  Call c;
  c.options.key_step = 16;
  c.options.causal = Causal::top_left;
  int asked = 0;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const GpuModel& gpu = gpu_model_named("h100");
    for (const Candidate& candidate : pass == Pass::forward
                                          ? explain_attention_on(gpu, c.q(), c.k(), c.k(), c.options)
                                          : explain_attention_backward_on(gpu, c.q(), c.k(), c.k(), {}, c.options)) {
      if (candidate.device != Device::cuda || is_decode(candidate)) continue;
      const std::string chosen = pass == Pass::forward ? "sm90" : "sm80";
      const bool serves = candidate.name == "sm80" || candidate.name == chosen;
      EXPECT_EQ(candidate.supported, serves) << candidate.name;
      if (!serves) {
        EXPECT_EQ(candidate.reason, "it has no q_step and key_step above 1") << candidate.name;
      }
      EXPECT_EQ(candidate.chosen, candidate.name == chosen) << candidate.name;
      ++asked;
    }
  }
  EXPECT_GT(asked, 0);
}

TEST_F(ExplainOn, OfFewRowsTheyAreForDecodeKernels) {
  const auto with = [](auto change) {
    Call c{.Sq = 1, .Sk = 8192};
    change(c.options);
    return c;
  };
  const Call wide = with([](auto& o) { o.float32_out = true; });
  const Call piece = with([](auto& o) {
    o.q_offset = o.key_offset = view(DType::i32, {2});
    o.causal = Causal::top_left;
  });
  const Call stepped = with([](auto& o) {
    o.key_offset = view(DType::i32, {2});
    o.key_step = 8, o.causal = Causal::top_left, o.float32_out = true;
  });
  for (const Call& c : {wide, piece, stepped}) {
    EXPECT_EQ(chosen_on("h100", c), "sm90_decode");
    EXPECT_EQ(chosen_on("a100", c), "sm80_decode");
  }
  const Call sloped = with([](auto& o) {
    o.q_offset = view(DType::i32, {2});
    o.alibi_slopes = view(DType::f32, {8});
  });
  EXPECT_EQ(chosen_on("h100", sloped), "sm80");
  const Call far = with([](auto& o) {
    o.q_offset = view(DType::i32, {2});
    o.window_left = (1 << 28) + 1;
  });
  for (const char* name : {"sm90_decode", "sm80_decode"}) {
    const auto said = [&](const Call& c) {
      return reason_of(explain_attention_on(gpu_model_named("h100"), c.q(), c.k(), c.k(), c.options), name);
    };
    EXPECT_EQ(said(sloped), "it has no ALiBi, bias and mask beside q_offset and key_offset");
    EXPECT_EQ(said(far),
              "sequences and windows must be no longer than 268435456 positions beside q_offset and key_offset");
  }
}

TEST_F(ExplainOn, PiecesWithDropoutOrFarWindowsAreNot) {
  Call dropped, far;
  dropped.options.q_offset = far.options.q_offset = view(DType::i32, {2});
  dropped.options.dropout.p = 0.5f;
  far.options.window_left = (1 << 28) + 1;
  const auto said = [](const Call& c) {
    return reason_of(explain_attention_on(gpu_model_named("h100"), c.q(), c.k(), c.k(), c.options), "sm80");
  };
  EXPECT_EQ(said(dropped), "it has no dropout beside q_offset and key_offset");
  EXPECT_EQ(said(far),
            "sequences and windows must be no longer than 268435456 positions beside q_offset and key_offset");
}

TEST_F(ExplainOn, GradientsOfPiecesHaveTheirLimits) {
  const auto said = [](auto change) {
    Call c;
    c.options.q_step = 4;
    c.options.causal = Causal::top_left;
    change(c.options);
    return reason_of(explain_attention_backward_on(gpu_model_named("h100"), c.q(), c.k(), c.k(), {}, c.options),
                     "sm80");
  };
  EXPECT_EQ(said([](AttentionOptions& o) { o.deterministic = true; }), "");
  EXPECT_EQ(said([](AttentionOptions& o) { o.window_left = 2; }), "");
  EXPECT_EQ(said([](AttentionOptions& o) { o.window_left = 2, o.deterministic = true; }),
            "it has no deterministic sums where rows or keys stand farther apart than the window is wide");
  EXPECT_EQ(said([](AttentionOptions& o) { o.window_left = (1 << 28) + 1; }),
            "sequences and windows must be no longer than 268435456 positions beside q_offset, key_offset and steps");
}

// Of the driver's answer only what must be: a bound from below, for which no kernel is asked.
TEST_F(ExplainOn, ClustersAreTheLeastThatThereCanBe) {
  const auto ask = [](int size) { return -size; };
  EXPECT_EQ(cuda::clusters_held(ask, 4), -4);
  const cuda::AssumedGpu assumed(gpu_model_named("h100"));
  EXPECT_EQ(cuda::clusters_held(ask, 1), 132);
  EXPECT_EQ(cuda::clusters_held(ask, 2), 66);
  EXPECT_EQ(cuda::clusters_held(ask, 3), 38);
  EXPECT_EQ(cuda::clusters_held(ask, 4), 29);
  EXPECT_EQ(cuda::clusters_held(ask, 16), 1);
}

}  // namespace
}  // namespace heddle
