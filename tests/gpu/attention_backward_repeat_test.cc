// What a caller of the GPU's backward may rely on: bits in deterministic mode, beside other sequences too, the same
// gradients but for rounding in the other mode; the workspace's size, graphs, refusals.
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <thread>

#include "core/check.h"
#include "gpu/device_backward.h"
#include "heddle/error.h"

namespace heddle::kit {
namespace {

// Many tiles of rows add to the same dq, many groups to the same dk and dv, and they end in another order each time.
AttentionCase large(std::int64_t length, std::int64_t heads, std::int64_t size, Causal causal,
                    DType dtype = DType::bf16) {
  AttentionCase spec{.B = 1, .H = heads, .Hkv = heads / 2, .Sq = length, .Sk = length, .D = size, .Dv = size};
  spec.name = text("s", length, "_d", size);
  spec.dtype = dtype;
  spec.causal = causal;
  return spec;
}

constexpr const char* kNone = "no candidate of the GPU takes it";

// A candidate in one of the modes that it has.
struct Way {
  std::string candidate;
  bool deterministic;

  void take(BackwardCase& at) const {
    at.call.forward.options.force = candidate;
    at.call.forward.options.deterministic = deterministic;
  }
  // Whether it may give `y` where it gave `x`.
  bool same(const Gradients& x, const Gradients& y) const { return deterministic ? same_bits(x, y) : close(x, y); }
};
void PrintTo(const Way& way, std::ostream* out) {
  *out << way.candidate << (way.deterministic ? ", deterministic" : "");
}

std::vector<Way> ways(BackwardCase& at) {
  std::vector<Way> out;
  for (bool deterministic : {true, false}) {
    at.call.forward.options.deterministic = deterministic;
    for (const std::string& candidate : candidates(at.call)) out.push_back({candidate, deterministic});
  }
  return out;
}

class GpuBackwardRepeats : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(GpuBackwardRepeats, AnyContentsOfTheWorkspace) {
  BackwardCase at(GetParam());
  const std::vector<Way> all = ways(at);
  if (all.empty()) GTEST_SKIP() << kNone;
  for (const Way& way : all) {
    SCOPED_TRACE(::testing::PrintToString(way));
    way.take(at);
    const DeviceStream stream;
    std::optional<Gradients> expected;
    for (int garbage : {0xFF, 0x00, 0x7F, 0x3C}) {
      const DeviceMemory memory(at.call.workspace(), garbage);
      for (int n = 0; n < 50; ++n) {
        at.poison();
        at.call.launch(stream, memory);
        stream.synchronize();
        Gradients out = at.read();
        if (!expected) {
          expect_finite(out);
          expected = std::move(out);
        } else {
          ASSERT_TRUE(way.same(*expected, out)) << "repeat " << n << " differs";
        }
      }
    }
  }
}

std::vector<AttentionCase> repeated_cases() {
  std::vector<AttentionCase> cases;
  for (const char* name :
       {"round_s128_d128_bf16", "round_s256_d64_causal_f16", "round_s96_d80_gqa4_bf16", "round_s64_d256_f16",
        "round_s512_k32_f32", "feature_all_scores_f16", "feature_packed_all_bf16", "feature_bias_heads_f16",
        "feature_bias_columns_bf16", "feature_sink_lse_gradient_window_bf16", "feature_used_both_bias_f32"}) {
    for (const AttentionCase& row : attention_cases()) {
      if (row.name == name) cases.push_back(row);
    }
  }
  cases.push_back(large(2304, 6, 64, Causal::bottom_right));
  cases.push_back(large(1100, 8, 128, Causal::none));
  cases.push_back(large(1500, 4, 256, Causal::bottom_right));
  cases.push_back(large(900, 4, 64, Causal::none, DType::f32));
  cases.push_back(large(700, 4, 40, Causal::top_left, DType::f16));
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuBackwardRepeats, ::testing::ValuesIn(repeated_cases()), case_name);

// Another stream's kernels take multiprocessors away, so that blocks run in another order.
TEST(GpuBackwardStreams, TwoThreadsOnTwoStreams) {
  BackwardCase first(large(1100, 4, 128, Causal::none)), second(large(2200, 4, 64, Causal::bottom_right), 2);
  const std::vector<Way> all = ways(first);
  if (all.empty()) GTEST_SKIP() << kNone;
  for (const Way& way : all) {
    SCOPED_TRACE(::testing::PrintToString(way));
    way.take(first);
    way.take(second);
    const auto repeat = [&](BackwardCase& at, int times, const Gradients* expected) {
      const DeviceStream stream;
      const DeviceMemory memory(at.call.workspace(), 0xFF);
      for (int n = 0; n < times; ++n) {
        at.call.launch(stream, memory);
        if (n % 10 != 9) continue;
        stream.synchronize();
        if (expected != nullptr && !way.same(*expected, at.read())) return false;
      }
      return true;
    };
    repeat(first, 10, nullptr);
    repeat(second, 10, nullptr);
    const Gradients of_first = first.read(), of_second = second.read();
    expect_finite(of_first);
    expect_finite(of_second);
    bool second_same = false;
    std::thread other([&] { second_same = repeat(second, 200, &of_second); });
    const bool first_same = repeat(first, 200, &of_first);
    other.join();
    EXPECT_TRUE(first_same) << "another stream's calls change the gradients";
    EXPECT_TRUE(second_same) << "another stream's calls change the gradients";
  }
}

// Whether the gradients of each sequence alone, written where the batch's call writes, have the bits that they have in
// it.
bool same_bits_alone(BackwardCase& at) {
  at.poison();
  at.call.run();
  const Gradients together = at.read();
  expect_finite(together);
  at.poison();
  for (std::int64_t b = 0; b < at.forward.runner.data().spec.B; ++b) {
    BackwardCall call = at.call;
    DeviceCall& forward = call.forward;
    AttentionGradients& to = call.gradients;
    for (TensorView* x : {&forward.q, &forward.k, &forward.v, &forward.o, &forward.lse, &call.d_o, &call.d_lse, &to.dq,
                          &to.dk, &to.dv}) {
      if (x->given()) *x = part(*x, 0, b, 1);
    }
    call.run();
  }
  return same_bits(together, at.read());
}

// As many key as query heads and one order of sums: then no batch changes a gradient, whichever candidate runs. Fewer
// rows than a tile, one tile, and several that take turns.
TEST(GpuBatchInvariance, GradientsAloneByThemselves) {
  bool any = false;
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const std::int64_t length : {17, 128, 700}) {
      for (const std::int64_t size : {64, 128, 256}) {
        for (const Causal causal : {Causal::none, Causal::bottom_right}) {
          AttentionCase spec = large(length, 4, size, causal, dtype);
          spec.B = 3;
          spec.Hkv = spec.H;
          BackwardCase at(spec);
          at.call.forward.options.deterministic = true;
          std::vector<std::string> forced = candidates(at.call);
          if (forced.empty()) continue;
          any = true;
          forced.emplace_back();  // none: what a caller gets
          for (const std::string& candidate : forced) {
            SCOPED_TRACE(text(spec.name, "_", name_of(dtype), causal == Causal::none ? " " : " causal ", candidate));
            at.call.forward.options.force = candidate;
            EXPECT_TRUE(same_bits_alone(at)) << "a sequence alone has other bits";
          }
        }
      }
    }
  }
  if (!any) GTEST_SKIP() << kNone;
}

class GpuBackwardWorkspace : public ::testing::TestWithParam<const char*> {};

// Exactly the bytes that it asked for, in either mode; nothing beside them is written.
TEST_P(GpuBackwardWorkspace, BetweenGuards) {
  constexpr std::size_t kGuard = 4096;
  constexpr int kPattern = 0xA5;
  BackwardCase at(attention_case(GetParam()));
  const std::vector<Way> all = ways(at);
  if (all.empty()) GTEST_SKIP() << kNone;
  for (const Way& way : all) {
    SCOPED_TRACE(::testing::PrintToString(way));
    way.take(at);
    const std::size_t bytes = at.call.workspace();
    const DeviceMemory memory(bytes + 2 * kGuard, kPattern);
    const DeviceStream stream;
    at.poison();
    at.call.launch(stream, Workspace{static_cast<std::byte*>(memory.data()) + kGuard, bytes});
    stream.synchronize();
    expect_finite(at.read());
    for (std::size_t offset : {std::size_t{0}, kGuard + bytes}) {
      std::vector<unsigned char> guard(kGuard);
      memory.read(offset, guard.data(), kGuard);
      EXPECT_EQ(std::ranges::count(guard, kPattern), static_cast<std::ptrdiff_t>(kGuard))
          << "it writes " << (offset == 0 ? "before" : "behind") << " its workspace of " << bytes;
    }
    if (bytes == 0) continue;
    EXPECT_THROW(at.call.launch(stream, Workspace{memory.data(), bytes - 1}), Error);
    EXPECT_THROW(at.call.launch(stream, Workspace{static_cast<std::byte*>(memory.data()) + 4, bytes}), Error);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuBackwardWorkspace,
                         ::testing::Values("round_s128_d128_bf16", "round_s256_d64_causal_f16",
                                           "round_s96_d80_gqa4_f32", "round_s64_d256_bf16", "feature_all_scores_f32",
                                           "feature_packed_all_bf16", "feature_used_both_bias_f16",
                                           "odd_q257_k200_d129_dv129_f32"),
                         [](const auto& info) { return std::string(info.param); });

// A captured call is one: replayed on other data in the same memory, it gives what a call gives.
TEST(GpuBackwardGraph, CaptureAndReplay) {
  for (const AttentionCase& spec : {large(300, 4, 128, Causal::none), large(700, 4, 64, Causal::bottom_right)}) {
    BackwardCase at(spec);
    const std::vector<Way> all = ways(at);
    if (all.empty()) GTEST_SKIP() << kNone;
    const CaseData other(spec, 2);
    DeviceTensor d_o(other.d_o);
    at.call.d_o = d_o.view();
    for (const Way& way : all) {
      SCOPED_TRACE(::testing::PrintToString(way) + " on " + spec.name);
      way.take(at);
      const auto run = [&](const HostTensor& data) {
        d_o.write(data);
        at.poison();
        at.call.run();
        return at.read();
      };
      const Gradients of_second = run(other.d_o), of_first = run(at.forward.runner.data().d_o);
      expect_finite(of_first);
      ASSERT_FALSE(close(of_first, of_second));

      const DeviceStream stream;
      const DeviceMemory memory(at.call.workspace(), 0xFF);
      at.poison();
      const DeviceGraph graph(stream, [&] { at.call.launch(stream, memory); });
      stream.synchronize();
      EXPECT_TRUE(same_bits(at.read(), at.host)) << "capture ran something";
      for (int n = 0; n < 3; ++n) graph.replay(stream);
      stream.synchronize();
      EXPECT_TRUE(way.same(at.read(), of_first)) << "a replay gives other gradients than a call";
      d_o.write(other.d_o);
      at.poison();
      graph.replay(stream);
      stream.synchronize();
      EXPECT_TRUE(way.same(at.read(), of_second)) << "a replay does not read what is there now";
    }
  }
}

// Refused with words, before anything is written.
TEST(GpuBackwardArguments, Devices) {
  BackwardCase at(attention_case("feature_all_scores_f32"));
  if (ways(at).empty()) GTEST_SKIP() << kNone;
  const CaseData host(at.forward.runner.data().spec);
  const Gradients gradients = host.new_gradients();
  const auto refused = [&](const BackwardCall& call, const std::string& words) {
    try {
      call.run();
      ADD_FAILURE() << "not refused: " << words;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what() << "\nlacks: " << words;
    }
    EXPECT_TRUE(same_bits(at.read(), at.host)) << "gradients were written";
  };
  BackwardCall call = at.call;
  call.d_o = host.d_o.view();
  refused(call, "d_o is on another device than q");
  call = at.call;
  call.d_lse = host.d_lse.view();
  refused(call, "d_lse is on another device than q");
  call = at.call;
  call.gradients.dk = gradients.dk.view();
  refused(call, "dk is on another device than q");
  call = at.call;
  call.gradients.dbias = gradients.dbias.view();
  refused(call, "dbias is on another device than q");
  call = at.call;
  call.forward.options.force = "cpu";
  refused(call, "force is 'cpu', which cannot serve this call: it runs on another device than the tensors are on");
}

}  // namespace
}  // namespace heddle::kit
