// Attention over GPUs by NCCL, a thread of this process for each rank: together they are one process's call by the
// reference in doubles and the rule that judges every kernel, the same bits each time, and so from a graph. With one
// rank, which any GPU is enough for, there are the same copies and calls, and no exchanges between GPUs.
//
// Run it with CUDA_MODULE_LOADING=EAGER (heddle/distributed_nccl.h says why).
#include <gtest/gtest.h>
#include <nccl.h>

#include <array>
#include <barrier>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/backend.h"
#include "cuda/stream_memory.h"
#include "heddle/distributed_nccl.h"
#include "heddle/error.h"
#include "kernels/distributed_cases.h"
#include "kit/device_mirror.h"

namespace heddle::kit::over_ranks {
namespace {

using distributed::Communicator;
using distributed::nccl_communicator;
using distributed::NcclId;
using distributed::NcclOptions;
using distributed::RankAttention;
using distributed::Scheme;

constexpr Scheme kSchemes[] = {Scheme::gather, Scheme::ring, Scheme::needed, Scheme::ulysses, Scheme::two_dimensional};
constexpr NcclOptions kPatient{.timeout = std::chrono::seconds(60)};

// Ranks 0 to n - 1 on GPUs of these numbers, kept from test to test.
class Ranks {
 public:
  Ranks(int count, const NcclOptions& options) : communicators_(static_cast<std::size_t>(count)) {
    const NcclId id = distributed::new_nccl_id();
    thrown_ = each([&](int rank, std::barrier<>&) {
      communicators_[static_cast<std::size_t>(rank)] = nccl_communicator(id, count, rank, options);
    });
  }
  ~Ranks() {
    each([&](int rank, std::barrier<>&) { communicators_[static_cast<std::size_t>(rank)].reset(); });
  }

  // What making them threw.
  const std::vector<std::string>& thrown() const { return thrown_; }
  Communicator& of(int rank) { return *communicators_[static_cast<std::size_t>(rank)]; }

  // body(rank, together) on all of them at once, each on its own GPU. What it throws is kept for each. together: memory
  // is not taken or given back while another rank's GPU may wait for this one's.
  std::vector<std::string> each(const std::function<void(int rank, std::barrier<>& together)>& body) {
    std::vector<std::string> thrown(communicators_.size());
    std::barrier together(std::ssize(communicators_));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < static_cast<int>(communicators_.size()); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          cuda::exchange_current_gpu(rank);
          body(rank, together);
        } catch (const std::exception& error) {
          thrown[static_cast<std::size_t>(rank)] = error.what();
        }
        together.arrive_and_drop();
      });
    }
    for (std::thread& thread : threads) thread.join();
    return thrown;
  }

 private:
  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::vector<std::string> thrown_;
};

// Made once for each number of ranks, as that takes a second, and left at the end, when CUDA may be gone before them.
Ranks& patient_ranks(int count) {
  static auto& all = *new std::array<std::unique_ptr<Ranks>, 3>;
  auto& ranks = all[static_cast<std::size_t>(count)];
  if (!ranks) ranks = std::make_unique<Ranks>(count, kPatient);
  return *ranks;
}

bool too_few_gpus(int ranks) { return std::ssize(cuda::gpus().list) < ranks; }
std::string why_too_few(int ranks) {
  return std::to_string(ranks) + " ranks need a GPU each, and there are " + std::to_string(cuda::gpus().list.size());
}

// A rank's tensors on its GPU.
struct ShareThere {
  Share& host;
  DeviceTensor q, k, v, d_o, d_lse, o, lse, dq, dk, dv, dsink, sink;
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
        sink(whole.data.sink) {
    options.softcap = whole.data.spec.softcap;
    options.sink = sink.view();
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
  for (int rank = 0; rank < plan.problem().ranks; ++rank) shares.push_back(share_of(whole, plan, rank));
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

// Without a timeout nothing waits on the host: a call that was made before is captured, forward and backward.
class GpuDistributedGraph : public ::testing::TestWithParam<int> {};

TEST_P(GpuDistributedGraph, HasTheBitsOfTheCalls) {
  const int count = GetParam();
  if (too_few_gpus(count)) GTEST_SKIP() << why_too_few(count);
  const Mask causal{.name = "causal", .causal = Causal::top_left};
  DistributedCase c{"graph", distributed_case_of(2, 301, 4, 2, DType::bf16), causal};
  c.spec.D = c.spec.Dv = 64;
  c.spec.causal = causal.causal;
  c.spec.d_lse = c.spec.sink = true;
  const Whole whole(c);
  const Plan plan(problem_of(c, count, Order::zigzag));
  Ranks ranks(count, {.timeout = {}, .multiprocessors = 4});
  ASSERT_EQ(ranks.thrown(), std::vector<std::string>(static_cast<std::size_t>(count)));
  for (const Scheme scheme : kSchemes) {
    SCOPED_TRACE(name_of(scheme));
    const std::vector<Share> with_timeout = run(patient_ranks(count), whole, plan, scheme);
    if (HasFailure()) return;  // the communicators may be gone
    std::vector<Share> called, replayed;
    for (int rank = 0; rank < count; ++rank) called.push_back(share_of(whole, plan, rank));
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
    expect_same_bits(called, with_timeout);
    expect_same_bits(called, replayed);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuDistributedGraph, ::testing::Values(1, 2));

TEST(GpuDistributed, ALostRankIsAnErrorWithinTheTimeout) {
  if (too_few_gpus(2)) GTEST_SKIP() << why_too_few(2);
  Ranks ranks(2, {.timeout = std::chrono::seconds(10)});
  ASSERT_EQ(ranks.thrown(), std::vector<std::string>(2));
  const auto thrown = ranks.each([&](int rank, std::barrier<>& together) {
    const DeviceMemory memory(64, 0);
    const DeviceStream stream;
    auto* const bytes = static_cast<std::byte*>(memory.data());
    Communicator& communicator = ranks.of(rank);
    communicator.use_stream(stream.get());
    communicator.exchange({bytes, 16}, 1 - rank, {bytes + 16, 16}, 1 - rank, "message of the test")->wait();
    together.arrive_and_wait();
    if (rank == 0) {
      try {
        communicator.exchange({bytes, 16}, 1, {bytes + 16, 16}, 1, "message of the test")->wait();
        ADD_FAILURE() << "nobody sent it";
      } catch (const RuntimeError& error) {
        EXPECT_EQ(std::string(error.what()),
                  "[distributed] message of the test: rank 0 waits for rank 1, in vain for 10000 ms");
      }
      try {
        communicator.exchange({bytes, 16}, 1, {}, 1, "message of the test")->wait();
        ADD_FAILURE() << "it was aborted";
      } catch (const RuntimeError& error) {
        EXPECT_EQ(std::string(error.what()),
                  "[distributed] message of the test: rank 0's communicator was aborted after an error");
      }
    }
    together.arrive_and_wait();
  });
  EXPECT_EQ(thrown, std::vector<std::string>(2));
}

// A caller's ncclComm_t, and what schemes are made of, on parts of different lengths.
TEST(GpuDistributed, TakesACommunicatorThatIsThere) {
  const int count = too_few_gpus(2) ? 1 : 2;
  ncclUniqueId id;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  std::vector<std::string> thrown(static_cast<std::size_t>(count));
  const auto body = [&](int rank) {
    cuda::exchange_current_gpu(rank);
    ncclComm_t comm = nullptr;
    ASSERT_EQ(ncclCommInitRank(&comm, count, id, rank), ncclSuccess);
    {
      const auto communicator = nccl_communicator(comm);
      ASSERT_EQ(communicator->size(), count);
      ASSERT_EQ(communicator->rank(), rank);
      EXPECT_EQ(communicator->device(), Device::cuda);
      const DeviceStream stream;
      communicator->use_stream(stream.get());
      communicator->barrier();
      // Rank r has 3 + 2 r numbers, and sends r + 1 + q of them to rank q.
      const auto numbers = [](int r) { return static_cast<std::size_t>(3 + 2 * r); };
      std::vector<float> own(numbers(rank));
      for (std::size_t n = 0; n < own.size(); ++n)
        own[n] = static_cast<float>(100 * (rank + 1)) + static_cast<float>(n);
      DeviceMemory sent(own.size() * sizeof(float));
      sent.write(0, own.data(), sent.bytes());
      const auto* const from = static_cast<const std::byte*>(sent.data());
      std::size_t all = 0, came = 0;
      for (int r = 0; r < count; ++r) all += numbers(r), came += static_cast<std::size_t>(r + 1 + rank);
      const DeviceMemory gathered(all * sizeof(float), 0), exchanged(came * sizeof(float), 0);
      std::vector<std::span<std::byte>> parts, in;
      std::vector<std::span<const std::byte>> out;
      auto *at = static_cast<std::byte*>(gathered.data()), *to = static_cast<std::byte*>(exchanged.data());
      for (int r = 0; r < count; ++r) {
        parts.emplace_back(at, numbers(r) * sizeof(float));
        at += parts.back().size();
        in.emplace_back(to, static_cast<std::size_t>(r + 1 + rank) * sizeof(float));
        to += in.back().size();
        out.emplace_back(from, static_cast<std::size_t>(rank + 1 + r) * sizeof(float));
      }
      communicator->all_gather({from, sent.bytes()}, parts, "test");
      communicator->all_to_all(out, in, "test");
      stream.synchronize();
      std::vector<float> found(all), found_in(came);
      gathered.read(0, found.data(), gathered.bytes());
      exchanged.read(0, found_in.data(), exchanged.bytes());
      std::vector<float> right, right_in;
      for (int r = 0; r < count; ++r) {
        for (std::size_t n = 0; n < numbers(r); ++n) {
          right.push_back(static_cast<float>(100 * (r + 1)) + static_cast<float>(n));
          if (n < static_cast<std::size_t>(r + 1 + rank)) right_in.push_back(right.back());
        }
      }
      EXPECT_EQ(found, right);
      EXPECT_EQ(found_in, right_in);

      // x and its sum over ranks, and what is each rank's of it.
      std::vector<float> x(2), scratch(2 * static_cast<std::size_t>(count));
      DeviceMemory sum(2 * sizeof(float)), space(2 * sizeof(float) * static_cast<std::size_t>(count), 0);
      const float value[] = {static_cast<float>(rank + 1), 0.5f};
      sum.write(0, value, sizeof value);
      const std::span<float> of_sum(static_cast<float*>(sum.data()), 2);
      const std::span<float> of_space(static_cast<float*>(space.data()), scratch.size());
      communicator->all_reduce(of_sum, of_space, "test");
      const DeviceMemory share(sizeof(float), 0);
      std::vector<std::span<const float>> shares(static_cast<std::size_t>(count), of_sum.first(1));
      communicator->reduce_scatter(shares, {static_cast<float*>(share.data()), 1}, of_space, "test");
      stream.synchronize();
      sum.read(0, x.data(), sum.bytes());
      EXPECT_EQ(x, (std::vector<float>{count == 1 ? 1.0f : 3.0f, 0.5f * static_cast<float>(count)}));
      float of_rank = 0;
      share.read(0, &of_rank, sizeof of_rank);
      EXPECT_EQ(of_rank, count == 1 ? 1.0f : 6.0f);
      communicator->barrier();
    }
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);  // it is the caller's still
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        thrown[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(thrown, std::vector<std::string>(static_cast<std::size_t>(count)));
}

TEST(GpuDistributed, RefusesInWords) {
  Ranks ranks(1, kPatient);
  ASSERT_EQ(ranks.thrown(), std::vector<std::string>(1));
  const Plan plan({.rows = 8, .ranks = 1});
  const std::vector<float> x(8 * 2 * 8);
  const TensorView on_host{x.data(), DType::f32, {1, 8, 2, 8}};
  const HostTensor host = HostTensor::output(DType::f32, {1, 8, 2, 8}),
                   lse_host = HostTensor::output(DType::f32, {1, 2, 8}),
                   slopes_host = HostTensor::output(DType::f32, {2});
  const auto thrown = ranks.each([&](int, std::barrier<>&) {
    const auto said = [](const std::function<void()>& body) -> std::string {
      try {
        body();
      } catch (const Error& error) {
        return error.what();
      }
      return "";
    };
    RankAttention attention(plan, ranks.of(0), Scheme::ring);
    EXPECT_EQ(said([&] { attention.forward(on_host, on_host, on_host, on_host, {}); }),
              "[distributed.forward] q is on the CPU: tensors must lie where messages by NCCL do, on a GPU");
    const DeviceTensor q(host), o(host), lse(lse_host), slopes(slopes_host);
    EXPECT_EQ(said([&] {
                attention.backward(q.view(), q.view(), q.view(), o.view(), lse.view(), o.view(), {}, {},
                                   {.scale = {}, .alibi_slopes = slopes.view()});
              }),
              "[distributed.backward] alibi_slopes are given: gradients of pieces on a GPU have no ALiBi");
    EXPECT_EQ(said([&] { distributed::RankDecode decode(ranks.of(0)); }),
              "[distributed.decode] messages by NCCL lie on a GPU: decoding over ranks is on the CPU so far");
    const DeviceStream stream;
    std::string what;
    const DeviceGraph graph(stream, [&] {
      ranks.of(0).use_stream(stream.get());
      std::byte* const data = static_cast<std::byte*>(q.view().data);
      what = said([&] { ranks.of(0).exchange({data, 4}, 0, {data + 4, 4}, 0, "test")->wait(); });
    });
    EXPECT_EQ(what,
              "[distributed] test: the stream is captured and the communicator has a timeout: the host would wait for "
              "what does not run yet");
  });
  EXPECT_EQ(thrown, std::vector<std::string>(1));
  const auto refused = [](const std::function<void()>& body) -> std::string {
    try {
      body();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refused([] { nccl_communicator(NcclId{}, 2, 2); }),
            "[distributed.nccl_communicator] size is 2 and rank 2: it must be size >= 1 and 0 <= rank < size");
  EXPECT_EQ(refused([] { nccl_communicator(NcclId{}, 2, 0, {.timeout = std::chrono::milliseconds(0)}); }),
            "[distributed.nccl_communicator] timeout is 0 ms: it must be above 0");
  EXPECT_EQ(refused([] { nccl_communicator(NcclId{}, 2, 0, {.multiprocessors = -1}); }),
            "[distributed.nccl_communicator] multiprocessors is -1: it must be at least 1, or 0 for NCCL's choice");
  EXPECT_EQ(refused([] { nccl_communicator(nullptr); }),
            "[distributed.nccl_communicator] comm is null: it must be an ncclComm_t");
}

}  // namespace
}  // namespace heddle::kit::over_ranks
