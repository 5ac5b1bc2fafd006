// What a caller of the GPU may rely on bit for bit: repeats, workspace contents, the rest of the batch, parallel calls.
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <thread>

#include "core/check.h"
#include "gpu/device_call.h"

namespace heddle::kit {
namespace {

// More tiles than the GPU has multiprocessors, of uneven length, and several tiles of keys: what races need.
AttentionCase large(std::int64_t length, std::int64_t heads, std::int64_t size, Causal causal) {
  AttentionCase spec{.B = 1, .H = heads, .Hkv = heads / 2, .Sq = length, .Sk = length, .D = size, .Dv = size};
  spec.name = text("s", length, "_d", size);
  spec.dtype = DType::bf16;
  spec.causal = causal;
  return spec;
}

void expect_repeats(const AttentionCase& spec) {
  SCOPED_TRACE(spec.name);
  DeviceCase at(spec);
  const std::vector<std::string> candidates = at.runner.candidates(Pass::forward);
  ASSERT_FALSE(candidates.empty());
  for (const std::string& candidate : candidates) {
    at.call.options.force = candidate;
    const DeviceStream stream;
    std::optional<ForwardOutputs> expected;
    for (int garbage : {0xFF, 0x00}) {
      DeviceMemory memory(at.call.workspace(), garbage);
      for (int n = 0; n < 100; ++n) {
        at.poison();
        at.call.launch(stream, memory);
        stream.synchronize();
        const ForwardOutputs out = at.read();
        if (!expected) expect_finite(*(expected = out));
        ASSERT_TRUE(same_bits(*expected, out)) << candidate << ": repeat " << n << " has other bits";
      }
    }
  }
}

TEST(GpuRepeats, TableRows) {
  for (const char* name : {"round_s128_d128_bf16", "round_s256_d64_causal_f16", "round_s96_d80_gqa4_bf16",
                           "round_s64_d256_f16", "round_s256_d64_causal_f32", "round_s64_d256_f32",
                           "feature_e4m3_d128_e4m3", "feature_e4m3_causal_e4m3", "feature_e4m3_large_logits_e4m3"}) {
    expect_repeats(attention_case(name));
  }
}

// Keys of a row split over many multiprocessors, in parts that lie anywhere.
TEST(GpuRepeats, Decode) {
  for (const char* name : {"decode_long_bf16", "decode_pages_16_many_bf16", "decode_rows_5_of_16_heads_bf16",
                           "decode_rows_4_of_8_heads_bf16"}) {
    expect_repeats(attention_case(name));
  }
}

// Warpgroups that have a head each, halves of the keys, or rows each and values to clear together.
TEST(GpuRepeats, DecodeOfManyRows) {
  for (const char* name : {"decode_rows_32_of_two_heads_bf16", "decode_rows_64_f16", "decode_rows_64_pages_16_bf16",
                           "decode_rows_100_bias_mask_bf16", "decode_rows_16_d256_bf16"}) {
    expect_repeats(attention_case(name));
  }
}

TEST(GpuRepeats, LargeCausal) { expect_repeats(large(2304, 6, 64, Causal::bottom_right)); }
TEST(GpuRepeats, Large) { expect_repeats(large(1100, 8, 128, Causal::none)); }

// Keys split over the whole GPU, which finishes them in another order each time.
TEST(GpuRepeats, SplitKeys) {
  for (const char* name : {"decode_uneven_lengths_f16", "decode_1_4096_bf16", "decode_f8_cache_scaled_rows_f16"}) {
    expect_repeats(attention_case(name));
  }
}

DeviceTensor device_indices(std::int64_t count) {
  HostTensor host = HostTensor::input(DType::i32, {2});
  host.set(0, 0);
  host.set(1, static_cast<double>(count));
  return DeviceTensor(host);
}

// The call of sequence b alone, writing where the batch's call writes. `held` keeps index data alive.
DeviceCall alone(const DeviceCase& at, std::int64_t b, std::vector<DeviceTensor>& held) {
  const CaseData& data = at.runner.data();
  DeviceCall call = at.call;
  const auto cut = [&](const HostTensor& cu, TensorView& lengths, std::initializer_list<TensorView*> rows) {
    const auto begin = static_cast<std::int64_t>(cu.get(b));
    const std::int64_t count = static_cast<std::int64_t>(cu.get(b + 1)) - begin;
    held.push_back(device_indices(count));
    lengths = held.back().view();
    for (TensorView* x : rows) *x = part(*x, 0, begin, count);
    return std::pair(begin, count);
  };
  if (data.cu_seqlens_q.given()) {
    const auto [begin, count] = cut(data.cu_seqlens_q, call.options.cu_seqlens_q, {&call.q, &call.o});
    call.lse = part(call.lse, 1, begin, count);
  } else {
    for (TensorView* x : {&call.q, &call.o, &call.lse}) *x = part(*x, 0, b, 1);
    if (TensorView& x = call.options.q_scale; x.given() && x.shape[0] == data.spec.B) x = part(x, 0, b, 1);
  }
  if (data.cu_seqlens_k.given()) {
    cut(data.cu_seqlens_k, call.options.cu_seqlens_k, {&call.k, &call.v});
  } else if (!data.page_table.given() && !data.cache_batch_idx.given()) {
    for (TensorView* x : {&call.k, &call.v, &call.options.k_scale, &call.options.v_scale}) {
      if (x->given() && x->shape[0] == data.spec.B) *x = part(*x, 0, b, 1);
    }
  }
  AttentionOptions& options = call.options;
  for (TensorView* x : {&options.bias, &options.mask, &options.seqused_q, &options.seqused_k, &options.page_table,
                        &options.cache_batch_idx, &options.cache_leftpad}) {
    if (x->given() && x->shape[0] == data.spec.B) *x = part(*x, 0, b, 1);
  }
  if (options.alibi_slopes.rank == 2) options.alibi_slopes = part(options.alibi_slopes, 0, b, 1);
  return call;
}

// Whether each sequence alone, with its call as `change` leaves it, has the bits that it has in the batch.
bool same_bits_alone(DeviceCase& at, const std::function<void(DeviceCall&)>& change) {
  at.poison();
  at.call.run();
  const ForwardOutputs together = at.read();
  at.poison();
  for (std::int64_t b = 0; b < at.runner.data().spec.B; ++b) {
    std::vector<DeviceTensor> held;
    DeviceCall call = alone(at, b, held);
    change(call);
    call.run();
  }
  return same_bits(together, at.read());
}

class GpuBatchInvariance : public ::testing::TestWithParam<const char*> {};

TEST_P(GpuBatchInvariance, SequencesAlone) {
  DeviceCase at(attention_case(GetParam()));
  at.call.options.batch_invariant = true;
  std::vector<std::string> candidates;
  for (const Candidate& c : explain_attention(at.call.q, at.call.k, at.call.v, at.call.options)) {
    if (c.supported && c.method != "reference") candidates.push_back(c.name);
  }
  if (candidates.empty()) GTEST_SKIP() << "no candidate of the GPU takes " << GetParam();
  for (const std::string& candidate : candidates) {
    at.call.options.force = candidate;
    EXPECT_TRUE(same_bits_alone(at, [](DeviceCall&) {})) << candidate << ": a sequence alone has other bits";
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuBatchInvariance,
                         ::testing::Values("round_s64_d64_bf16", "round_s128_d32_encoder_f16", "round_s96_d80_gqa4_f16",
                                           "feature_alibi_per_batch_causal_f16", "feature_bias_full_f16",
                                           "feature_mask_columns_bf16", "feature_packed_f16",
                                           "feature_packed_causal_bf16", "feature_used_both_causal_bf16",
                                           "feature_paged_64_f16", "feature_cache_batch_idx_bf16",
                                           "feature_leftpad_f16", "decode_rows_3_batch_bf16", "decode_paged_16_bf16",
                                           "decode_packed_f16", "feature_e4m3_d128_e4m3",
                                           "feature_e4m3_packed_causal_e4m3", "feature_e4m3_used_both_causal_e4m3",
                                           "decode_uneven_lengths_f16", "decode_f8_cache_scaled_heads_bf16",
                                           "decode_pages_16_f16", "decode_pages_256_f16", "decode_f8_cache_paged_bf16",
                                           "feature_packed_causal_f32", "feature_paged_64_f32"),
                         [](const auto& info) { return std::string(info.param); });

// What a call gets by itself: on both sides of where tiles and candidates change, by length and by the work of a batch.
struct Unforced {
  std::int64_t B, Hkv, Sq, Sk, D;
  bool packed, batch_invariant;
};

void expect_alone_by_themselves(const Unforced& x, DType dtype, Causal causal) {
  AttentionCase spec{.B = x.B, .H = 4, .Hkv = x.Hkv, .Sq = x.Sq, .Sk = x.Sk, .D = x.D, .Dv = x.D};
  spec.name = text("B", x.B, "_s", x.Sq, "_of_", x.Sk, "_d", x.D, x.packed ? "_packed_" : "_", name_of(dtype));
  spec.dtype = dtype;
  spec.causal = causal;
  spec.packed_q = spec.packed_k = x.packed;
  SCOPED_TRACE(spec.name);
  DeviceCase at(spec);
  at.call.options.batch_invariant = x.batch_invariant;
  const auto with_own_length = [&](DeviceCall& call) {
    // As a caller would say it; but a prefill's, since decode promises bits only when asked to.
    const std::int64_t least = x.batch_invariant ? 1 : 17;
    call.options.max_seqlen_q = x.packed ? std::max(call.q.shape[0], least) : 0;
    call.options.max_seqlen_k = x.packed ? std::max(call.k.shape[0], least) : 0;
  };
  EXPECT_TRUE(same_bits_alone(at, with_own_length)) << "a sequence alone has other bits";
}

TEST(GpuBatchInvariance, SequencesAloneByThemselves) {
  for (const Unforced& x : {Unforced{4, 2, 2600, 2600, 64, true, false}, Unforced{3, 2, 1300, 1300, 64, true, false},
                            Unforced{4, 2, 700, 700, 128, true, false}, Unforced{3, 1, 200, 200, 256, true, false},
                            Unforced{40, 4, 17, 300, 64, false, false}, Unforced{40, 1, 33, 300, 128, false, false},
                            Unforced{70, 4, 64, 520, 128, false, false}, Unforced{9, 4, 129, 260, 96, false, false},
                            Unforced{40, 2, 1, 3000, 128, false, true}, Unforced{40, 4, 8, 600, 64, false, true},
                            Unforced{3, 2, 16, 16, 128, true, true}, Unforced{3, 2, 60, 60, 128, true, true}}) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32, DType::f8e4m3}) {
      // Of e4m3 nothing is promised of packed sequences, nor for heads above 128; and it does not decode.
      const bool e4m3 = dtype == DType::f8e4m3;
      if (e4m3 && (x.packed || x.Sq <= 16 || x.D > 128 || current_gpu().major != 9)) continue;
      for (const Causal causal : {Causal::none, Causal::bottom_right}) expect_alone_by_themselves(x, dtype, causal);
    }
  }
}

// Packed keys that the L2 cache cannot hold, of one head or of two: Hopper's tiles go by sections of sequences, more of
// them than a warp looks at together, or of heads.
TEST(GpuBatchInvariance, SectionsOfPackedSequences) {
  for (const Unforced& x :
       {Unforced{70, 1, 60, 1600, 256, true, false}, Unforced{40, 2, 200, 1300, 256, true, false}}) {
    for (const Causal causal : {Causal::none, Causal::bottom_right}) {
      AttentionCase spec{.B = x.B, .H = 4, .Hkv = x.Hkv, .Sq = x.Sq, .Sk = x.Sk, .D = x.D, .Dv = x.D};
      spec.name = text("B", x.B, "_s", x.Sq, "_of_", x.Sk);
      spec.dtype = DType::bf16;
      spec.causal = causal;
      spec.packed_q = spec.packed_k = true;
      SCOPED_TRACE(spec.name);
      DeviceCase at(spec);
      const std::vector<std::string> candidates = at.runner.candidates(Pass::forward);
      EXPECT_EQ(std::ranges::count(candidates, "sm90"), current_gpu().major == 9 ? 1 : 0);
      for (const std::string& candidate : candidates) {
        if (candidate != "sm90" && candidate != "sm80") continue;
        at.call.options.force = candidate;
        EXPECT_TRUE(same_bits_alone(at, [](DeviceCall&) {})) << candidate << ": a sequence alone has other bits";
      }
    }
  }
}

// More sequences and more heads fill the GPU otherwise; no row may notice.
TEST(GpuBatchInvariance, CopiesInABatch) {
  AttentionCase spec = large(700, 4, 64, Causal::bottom_right);
  spec.B = 9;
  spec.layout_q = spec.layout_k = Layout::expanded;  // all sequences and heads are the same
  DeviceCase at(spec);
  for (const std::string& candidate : at.runner.candidates(Pass::forward)) {
    SCOPED_TRACE(candidate);
    at.call.options.force = candidate;
    at.poison();
    at.call.run();
    const ForwardOutputs out = at.read();
    expect_finite(out);
    for (std::int64_t n = 0; n < out.o.elements(); ++n) {
      const std::int64_t i = n / (spec.Dv * spec.H) % spec.Sq;
      ASSERT_EQ(out.o.get(n), out.o.get(i * spec.H * spec.Dv + n % spec.Dv)) << "element " << n;
    }
  }
}

TEST(GpuStreams, TwoThreadsOnTwoStreams) {
  DeviceCase first(large(600, 4, 128, Causal::none)), second(large(2200, 4, 64, Causal::bottom_right), "", 2);
  const auto repeat = [](DeviceCase& at, int times, ForwardOutputs& out, bool& same) {
    const DeviceStream stream;
    const DeviceMemory memory(at.call.workspace(), 0xFF);
    for (int n = 0; n < times; ++n) {
      at.call.launch(stream, memory);
      if (n % 10 != 9) continue;
      stream.synchronize();
      ForwardOutputs now = at.read();
      if (n == 9 && times == 10)
        out = std::move(now);
      else
        same = same && same_bits(out, now);
    }
  };
  ForwardOutputs first_out, second_out;
  bool first_same = true, second_same = true;
  repeat(first, 10, first_out, first_same);
  repeat(second, 10, second_out, second_same);
  expect_finite(first_out);
  expect_finite(second_out);
  std::thread other([&] { repeat(second, 200, second_out, second_same); });
  repeat(first, 200, first_out, first_same);
  other.join();
  EXPECT_TRUE(first_same) << "another thread's calls change the bits";
  EXPECT_TRUE(second_same) << "another thread's calls change the bits";
}

// Calls of one kernel that need different amounts of shared memory: what one thread asks for, another relies on.
TEST(GpuStreams, TwoThreadsLaunchOneKernelWithOtherMemory) {
  const auto decode = [](std::int64_t rows, std::int64_t group) {
    AttentionCase spec{.B = 8, .H = 4 * group, .Hkv = 4, .Sq = rows, .Sk = 300, .D = 128, .Dv = 128};
    spec.name = text("decode_of_", rows * group, "_rows");
    spec.dtype = DType::bf16;
    return spec;
  };
  DeviceCase few(decode(1, 1)), many(decode(4, 4));
  for (const std::string& candidate : few.runner.candidates(Pass::forward)) {
    SCOPED_TRACE(candidate);
    std::string failure[2];
    const auto launch_often = [&](DeviceCase& at, std::string& failed) {
      at.call.options.force = candidate;
      const DeviceStream stream;
      const DeviceMemory memory(at.call.workspace(), 0xFF);
      try {
        for (int n = 0; n < 5000; ++n) at.call.launch(stream, memory);
      } catch (const RuntimeError& error) {
        failed = error.what();
      }
      stream.synchronize();
    };
    std::thread other([&] { launch_often(many, failure[1]); });
    launch_often(few, failure[0]);
    other.join();
    EXPECT_EQ(failure[0] + failure[1], "");
  }
}

// The first that a thread does on the GPU: the driver knows of no context in it.
TEST(GpuStreams, AThreadMayBeginWithAnyCall) {
  AttentionCase spec{.B = 2, .H = 4, .Hkv = 4, .Sq = 100, .Sk = 100, .D = 64, .Dv = 64};
  spec.name = "first_in_its_thread";
  spec.dtype = DType::bf16;
  DeviceCase at(spec);
  for (const Candidate& candidate : explain_attention(at.call.q, at.call.k, at.call.v, at.call.options)) {
    if (!candidate.supported || candidate.method == "reference") continue;
    at.call.options.force = candidate.name;
    const DeviceStream stream;
    const DeviceMemory memory(at.call.workspace(), 0xFF);
    std::string failure;
    std::thread other([&] {
      try {
        at.call.launch(stream, memory);
      } catch (const RuntimeError& error) {
        failure = error.what();
      }
    });
    other.join();
    stream.synchronize();
    EXPECT_EQ(failure, "") << candidate.name;
  }
}

// A captured call is one: replayed on other data in the same memory, it gives what a call gives.
TEST(GpuGraph, CaptureAndReplay) {
  for (const AttentionCase& spec : {large(300, 4, 128, Causal::none), large(2200, 4, 64, Causal::bottom_right)}) {
    DeviceCase at(spec);
    const CaseData other(spec, 2);
    DeviceTensor q(other.q);
    for (const std::string& candidate : at.runner.candidates(Pass::forward)) {
      SCOPED_TRACE(candidate + " on " + spec.name);
      at.call.q = q.view();
      at.call.options.force = candidate;
      at.poison();
      at.call.run();
      const ForwardOutputs of_second = at.read();
      q.write(at.runner.data().q);
      at.poison();
      at.call.run();
      const ForwardOutputs of_first = at.read();
      expect_finite(of_first);
      ASSERT_FALSE(same_bits(of_first, of_second));

      const DeviceStream stream;
      const DeviceMemory memory(at.call.workspace(), 0xFF);
      at.poison();
      const DeviceGraph graph(stream, [&] { at.call.launch(stream, memory); });
      stream.synchronize();
      EXPECT_EQ(at.read().o.damage(), "");
      EXPECT_TRUE(at.read().o.same_bits(at.host_o)) << "capture ran something";
      for (int n = 0; n < 3; ++n) graph.replay(stream);
      stream.synchronize();
      EXPECT_TRUE(same_bits(at.read(), of_first)) << "a replay gives other bits than a call";
      q.write(other.q);
      at.poison();
      graph.replay(stream);
      stream.synchronize();
      EXPECT_TRUE(same_bits(at.read(), of_second)) << "a replay does not read what is there now";
    }
  }
}

}  // namespace
}  // namespace heddle::kit
