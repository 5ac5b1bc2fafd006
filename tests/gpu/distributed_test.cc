// Attention over GPUs by NCCL, a thread of this process for each rank: together they are one process's call by the
// reference in doubles and the rule that judges every kernel, the same bits each time, and so from a graph. With one
// rank, which any GPU is enough for, there are the same copies and calls, and no exchanges between GPUs.
//
// Run it with CUDA_MODULE_LOADING=EAGER (heddle/distributed_nccl.h says why).
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "gpu/nccl_ranks.h"
#include "kernels/distributed_cases.h"
#include "kit/deadline.h"
#include "kit/device_mirror.h"

namespace heddle::kit::over_ranks {
namespace {

using distributed::RankAttention;
using distributed::Scheme;

constexpr Scheme kSchemes[] = {Scheme::gather, Scheme::ring, Scheme::needed, Scheme::ulysses, Scheme::two_dimensional};

// Made once for each number of ranks, as that takes a second, and left at the end, when CUDA may be gone before them.
Ranks& patient_ranks(int count) {
  static auto& all = *new std::array<std::unique_ptr<Ranks>, 3>;
  auto& ranks = all[static_cast<std::size_t>(count)];
  if (!ranks) ranks = std::make_unique<Ranks>(count, kPatient);
  return *ranks;
}

// A rank's tensors on its GPU.
struct ShareThere {
  Share& host;
  DeviceTensor q, k, v, d_o, d_lse, o, lse, dq, dk, dv, dsink, sink, alibi, bias;
  distributed::Options options;

  ShareThere(const Whole& whole, Share& s)
      : host(s),
        q(s.q),
        k(s.k),
        v(s.v),
        d_o(s.d_o),
        d_lse(s.d_lse),
        o(s.o),
        lse(s.lse),
        dq(s.dq),
        dk(s.dk),
        dv(s.dv),
        dsink(s.dsink),
        sink(whole.data.sink),
        alibi(whole.data.alibi),
        bias(s.bias) {
    options.softcap = whole.data.spec.softcap;
    options.sink = sink.view();
    options.alibi_slopes = alibi.view();
    options.bias = bias.view();
    options.chunked = whole.data.spec.H % 4 == 0;
  }
  void forward(RankAttention& attention, const Runtime& runtime) const {
    attention.forward(q.view(), k.view(), v.view(), o.view(), lse.view(), options, runtime);
  }
  void backward(RankAttention& attention, const Runtime& runtime) const {
    attention.backward(q.view(), k.view(), v.view(), o.view(), lse.view(), d_o.view(), d_lse.view(),
                       {dq.view(), dk.view(), dv.view(), dsink.view()}, options, runtime);
  }
  void read() const {
    o.read(host.o), lse.read(host.lse), dq.read(host.dq), dk.read(host.dk), dv.read(host.dv);
    if (host.dsink.given()) dsink.read(host.dsink);
    for (const HostTensor* x : {&host.o, &host.lse, &host.dq, &host.dk, &host.dv}) EXPECT_EQ(x->damage(), "");
  }
};

std::vector<Share> run(Ranks& ranks, const Whole& whole, const Plan& plan, Scheme scheme) {
  std::vector<Share> shares;
  for (int rank = 0; rank < plan.problem().ranks; ++rank) {
    shares.push_back(share_of(whole.data, plan, rank));
    shares.back().dbias = {};  // pieces on a GPU have none
  }
  const auto thrown = ranks.each([&](int rank, std::barrier<>& together) {
    const ShareThere there(whole, shares[static_cast<std::size_t>(rank)]);
    const DeviceStream stream;
    Runtime runtime;
    runtime.stream = stream.get();
    together.arrive_and_wait();
    RankAttention attention(plan, ranks.of(rank), scheme);
    there.forward(attention, runtime);
    there.backward(attention, runtime);
    stream.synchronize();
    together.arrive_and_wait();
    there.read();
  });
  for (const std::string& what : thrown) EXPECT_EQ(what, "");
  return shares;
}

struct GpuCase {
  DistributedCase of;
  Order order = Order::zigzag;
};

void PrintTo(const GpuCase& c, std::ostream* out) { *out << c.of.name; }

std::vector<GpuCase> gpu_cases() {
  const Mask causal{.name = "causal", .causal = Causal::top_left};
  const Mask window{.name = "window", .causal = Causal::top_left, .left = 40};
  const Mask documents{.name = "documents", .causal = Causal::top_left, .cu_seqlens = {0, 1, 1, 150, 331, 331, 419}};
  const Mask areas{.name = "areas", .areas = {{0, 40, 0, 40}, {40, 190, 0, 40}, {40, 190, 40, 190, Causal::top_left}}};
  std::vector<GpuCase> out;
  const auto add = [&](const std::string& name, int64_t B, int64_t S, int64_t H, int64_t Hkv, DType dtype, int64_t D,
                       const Mask& mask, Order order, const std::function<void(AttentionCase&)>& change = {}) {
    AttentionCase spec = distributed_case_of(B, S, H, Hkv, dtype);
    spec.D = spec.Dv = D;
    spec.d_lse = true;
    spec.causal = mask.causal;
    spec.window_left = mask.left;
    spec.window_right = mask.right;
    if (change) change(spec);
    out.push_back({{name, spec, mask}, order});
  };
  const auto with_sink = [](AttentionCase& c) { c.sink = true; };
  add("causal_f32", 2, 203, 4, 2, DType::f32, 24, causal, Order::zigzag);
  add("causal_sink_bf16", 1, 333, 8, 2, DType::bf16, 64, causal, Order::zigzag, with_sink);
  add("causal_f16_unrounded", 2, 261, 2, 2, DType::f16, 128, causal, Order::zigzag,
      [](AttentionCase& c) { c.float32_out = true; });
  add("causal_striped_bf16", 2, 301, 4, 4, DType::bf16, 64, causal, Order::striped);
  add("full_other_sizes_bf16", 1, 190, 3, 3, DType::bf16, 40, {.name = "full"}, Order::contiguous,
      [](AttentionCase& c) { c.Dv = 24; });
  add("window_sink_f32", 1, 257, 4, 1, DType::f32, 64, window, Order::contiguous, with_sink);
  add("documents_bf16", 1, 419, 4, 2, DType::bf16, 64, documents, Order::zigzag);
  add("documents_sink_f32", 1, 419, 4, 2, DType::f32, 32, documents, Order::per_document, with_sink);
  add("documents_balanced_bf16", 1, 419, 6, 2, DType::bf16, 128, documents, Order::balanced);
  add("areas_softcap_f32", 1, 190, 4, 2, DType::f32, 64, areas, Order::zigzag, [](AttentionCase& c) { c.softcap = 3; });
  // Two ranks share a group of query heads in `ulysses`.
  add("cut_group_bf16", 1, 240, 3, 1, DType::bf16, 64, causal, Order::zigzag, with_sink);
  const auto with_alibi = [](AttentionCase& c) { c.alibi = Alibi::per_head; };
  add("causal_alibi_bf16", 2, 261, 4, 2, DType::bf16, 64, causal, Order::zigzag, with_alibi);
  add("causal_bias_bf16", 1, 230, 4, 2, DType::bf16, 64, causal, Order::zigzag, [](AttentionCase& c) {
    c.bias = {true, false, true, true, true}, c.bias_f32 = c.bias_holes = true;
  });
  add("documents_alibi_f32", 1, 419, 4, 2, DType::f32, 32, documents, Order::balanced, with_alibi);
  add("one_row_f32", 1, 1, 4, 2, DType::f32, 64, causal, Order::zigzag, with_sink);  // the other rank has none
  return out;
}

class GpuDistributedAttention : public ::testing::TestWithParam<std::tuple<GpuCase, int>> {};

TEST_P(GpuDistributedAttention, IsOneProcess) {
  const auto& [c, count] = GetParam();
  if (too_few_gpus(count)) GTEST_SKIP() << why_too_few(count);
  Whole whole(c.of);
  whole.plain_gradients.dq.largest_term *= 4;  // as CaseRunner has it: a term of f32 is known to 22 bits
  whole.plain_gradients.dk.largest_term *= 4;
  Ranks& ranks = patient_ranks(count);
  ASSERT_EQ(ranks.thrown(), std::vector<std::string>(static_cast<std::size_t>(count)));
  const Plan plan(problem_of(c.of, count, c.order));
  for (const Scheme scheme : kSchemes) {
    if (!is_served(whole.data.spec, plan, scheme)) continue;
    SCOPED_TRACE(name_of(scheme));
    const std::vector<Share> shares = run(ranks, whole, plan, scheme);
    if (HasFailure()) return;  // the communicators may be gone
    expect_whole(whole, plan, shares);
    expect_same_bits(shares, run(ranks, whole, plan, scheme));
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuDistributedAttention,
                         ::testing::Combine(::testing::ValuesIn(gpu_cases()), ::testing::Values(1, 2)),
                         [](const auto& info) {
                           return std::get<0>(info.param).of.name + "_on_" + std::to_string(std::get<1>(info.param));
                         });

// Nothing waits on the host, whether exchanges are watched or not: a call that was made before is captured, forward and
// backward.
class GpuDistributedGraph : public ::testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(GpuDistributedGraph, HasTheBitsOfTheCalls) {
  const auto& [count, watched] = GetParam();
  if (too_few_gpus(count)) GTEST_SKIP() << why_too_few(count);
  const Deadline deadline(std::chrono::minutes(5));
  const Mask causal{.name = "causal", .causal = Causal::top_left};
  DistributedCase c{"graph", distributed_case_of(2, 301, 4, 2, DType::bf16), causal};
  c.spec.D = c.spec.Dv = 64;
  c.spec.causal = causal.causal;
  c.spec.d_lse = c.spec.sink = true;
  const Whole whole(c);
  const Plan plan(problem_of(c, count, Order::zigzag));
  NcclOptions options{.multiprocessors = 4};
  if (!watched) options.timeout = {};
  Ranks ranks(count, options);
  ASSERT_EQ(ranks.thrown(), std::vector<std::string>(static_cast<std::size_t>(count)));
  for (const Scheme scheme : kSchemes) {
    SCOPED_TRACE(name_of(scheme));
    const std::vector<Share> waited_for = run(patient_ranks(count), whole, plan, scheme);
    if (HasFailure()) return;  // the communicators may be gone
    std::vector<Share> called, replayed;
    for (int rank = 0; rank < count; ++rank) called.push_back(share_of(whole.data, plan, rank));
    replayed = called;
    const auto thrown = ranks.each([&](int rank, std::barrier<>& together) {
      Share &first = called[static_cast<std::size_t>(rank)], &second = replayed[static_cast<std::size_t>(rank)];
      const ShareThere there(whole, first), again(whole, second);
      const DeviceStream stream;
      Runtime runtime;
      runtime.stream = stream.get();
      std::unique_ptr<DeviceGraph> graph;
      together.arrive_and_wait();
      RankAttention attention(plan, ranks.of(rank), scheme);
      there.forward(attention, runtime);
      there.backward(attention, runtime);
      stream.synchronize();
      together.arrive_and_wait();
      there.read();
      together.arrive_and_wait();
      graph = std::make_unique<DeviceGraph>(stream, [&] {
        again.forward(attention, runtime);
        again.backward(attention, runtime);
      });
      together.arrive_and_wait();
      for (int time = 0; time < 2; ++time) {
        graph->replay(stream);
        stream.synchronize();
      }
      together.arrive_and_wait();
      again.read();
      graph.reset();
    });
    ASSERT_EQ(thrown, std::vector<std::string>(static_cast<std::size_t>(count)));
    expect_same_bits(called, waited_for);
    expect_same_bits(called, replayed);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuDistributedGraph, ::testing::Combine(::testing::Values(1, 2), ::testing::Bool()),
                         [](const auto& info) {
                           return std::to_string(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) ? "_watched" : "_unwatched");
                         });

}  // namespace
}  // namespace heddle::kit::over_ranks
