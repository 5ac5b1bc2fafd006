// What attention over several ranks refuses, and what ranks say when others are lost.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "distributed/agreement.h"
#include "heddle/distributed.h"
#include "heddle/distributed_block.h"
#include "heddle/error.h"
#include "kit/host_tensor.h"
#include "kit/on_ranks.h"

namespace heddle::kit {
namespace {

using distributed::Communicator;
using distributed::Order;
using distributed::Plan;
using distributed::Problem;
using distributed::RankAttention;
using distributed::Scheme;
using std::int64_t;

constexpr auto kTimeout = std::chrono::seconds(60);

struct Share {
  HostTensor q, k, v, o;
};

// What a rank is refused before anything is sent, and what all are.
std::vector<std::string> refusals(Problem problem, const std::function<void(Share&, distributed::Options&)>& change,
                                  const std::function<Problem(int)>& problem_of_rank = {},
                                  Scheme scheme = Scheme::gather) {
  return on_ranks(problem.ranks, std::chrono::seconds(20), [&](Communicator& communicator) {
    const Plan plan(problem_of_rank ? problem_of_rank(communicator.rank()) : problem);
    const int64_t rows = plan.rows(communicator.rank());
    Share s;
    const auto filled = [](std::vector<int64_t> shape) {
      HostTensor x = HostTensor::output(DType::f32, std::move(shape));
      for (int64_t n = 0; n < x.elements(); ++n) x.set(n, 1);
      return x;
    };
    s.q = filled({1, rows, 4, 8});
    s.k = filled({1, rows, 2, 8});
    s.v = filled({1, rows, 2, 8});
    s.o = filled({1, rows, 4, 8});
    distributed::Options options;
    if (communicator.rank() == problem.ranks - 1) change(s, options);
    RankAttention(plan, communicator, scheme).forward(s.q.view(), s.k.view(), s.v.view(), s.o.view(), {}, options);
  });
}

TEST(DistributedRefusals, SayWhatAndWhy) {
  const Problem problem{.rows = 10, .ranks = 2, .causal = Causal::top_left};
  const auto last = [&](const auto& change) { return refusals(problem, change).back(); };
  EXPECT_EQ(last([](Share& s, auto&) {
              s.k = HostTensor::output(DType::f32, {1, 4, 2, 8});
            }),
            "[distributed.forward] k is [1, 4, 2, 8]: rank 1 of the plan has 5 rows");
  EXPECT_EQ(last([](Share& s, auto&) {
              s.o = HostTensor::output(DType::f16, {1, 5, 4, 8});
            }),
            "[distributed.forward] o is float16: it must be float32 or have q's dtype, float32");
  const HostTensor slopes = HostTensor::input(DType::f32, {3});
  EXPECT_EQ(last([&](Share&, auto& options) { options.sink = slopes.view(); }),
            "[distributed.forward] sink is [3]: it must be [H], 4");
  Problem striped = problem;
  striped.order = Order::striped;
  const HostTensor four = HostTensor::input(DType::f32, {4});
  EXPECT_EQ(refusals(striped, [&](Share&, auto& options) { options.alibi_slopes = four.view(); }).back(),
            "[distributed.forward] alibi_slopes are given and the plan's order is striped: its rows stand for several "
            "positions each, which ALiBi is not about");
  const HostTensor bias = HostTensor::input(DType::f32, {1, 1, 5, 10}),
                   narrow = HostTensor::input(DType::f32, {1, 1, 5, 9});
  const auto with_bias = [&](const Problem& of, const HostTensor& x, Scheme scheme) {
    return refusals(
               of, [&](Share&, auto& options) { options.bias = x.view(); }, {}, scheme)
        .back();
  };
  EXPECT_EQ(
      with_bias(problem, narrow, Scheme::gather),
      "[distributed.forward] bias is [1, 1, 5, 9]: it must be [B or 1, H or 1, rows, S], [1 or 1, 4 or 1, 5, 10]");
  EXPECT_EQ(with_bias(problem, bias, Scheme::ulysses),
            "[distributed.forward] bias is given and the scheme is ulysses: it must be gather, ring or needed");
  Problem documents = problem;
  documents.cu_seqlens = {0, 4, 10};
  for (const Problem& of : {striped, documents}) {
    EXPECT_EQ(with_bias(of, bias, Scheme::gather),
              "[distributed.forward] bias is given: the plan must have one document, in runs of rows");
  }
  const auto communicators = distributed::thread_communicators(3, kTimeout);
  const Plan plan(problem);
  try {
    RankAttention attention(plan, *communicators[0]);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), "[distributed.rank_attention] the plan is for 2 ranks and threads has 3");
  }
}

// One whose messages would lie on a GPU.
class OnGpu : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 4; }
  const char* name() const override { return "test"; }
  Device device() const override { return Device::cuda; }
  std::unique_ptr<distributed::Transfer> exchange(std::span<const std::byte>, int, std::span<std::byte>, int,
                                                  const distributed::Purpose&) override {
    ADD_FAILURE() << "nothing may be sent";
    return nullptr;
  }
};

std::string said(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(DistributedRefusals, TensorsLieWhereMessagesDo) {
  OnGpu on_gpu;
  const auto threads = distributed::thread_communicators(4, kTimeout);
  const auto view = [&](const std::vector<float>& x, Device device, std::int64_t heads) {
    TensorView out{x.data(), DType::f32, {1, std::ssize(x) / (8 * heads), heads, 8}};
    out.device = device;
    return out;
  };
  const Plan plan({.rows = 12, .ranks = 4, .causal = Causal::top_left});
  const std::vector<float> x(3 * 8 * 2);
  const auto forward = [&](Communicator& communicator, Device device) {
    const TensorView q = view(x, device, 2);
    return said([&] { RankAttention(plan, communicator, Scheme::ring).forward(q, q, q, q, {}); });
  };
  EXPECT_EQ(forward(on_gpu, Device::cpu),
            "[distributed.forward] q is on the CPU: tensors must lie where messages by test do, on a GPU");
  EXPECT_EQ(forward(*threads[0], Device::cuda),
            "[distributed.forward] q is on a GPU: tensors must lie where messages by threads do, on the CPU");
  EXPECT_EQ(said([&] { distributed::RankDecode decode(on_gpu); }),
            "[distributed.decode] messages by test lie on a GPU: decoding over ranks is on the CPU so far");
  EXPECT_EQ(said([&] { distributed::PipelineStage stage({}, on_gpu); }),
            "[pipeline_stage] messages by test lie on a GPU: blocks over several processes are on the CPU so far");
}

TEST(DistributedRefusals, GradientsThatNoGpuHas) {
  OnGpu on_gpu;
  std::vector<float> x(3 * 8 * 2), row(3 * 2);
  TensorView q{x.data(), DType::f32, {1, 3, 2, 8}}, lse{row.data(), DType::f32, {1, 2, 3}};
  q.device = lse.device = Device::cuda;
  const Plan plan({.rows = 12, .ranks = 4, .causal = Causal::top_left, .window_left = 2, .order = Order::striped});
  EXPECT_EQ(said([&] { RankAttention(plan, on_gpu, Scheme::gather).backward(q, q, q, q, lse, q, {}, {}); }),
            "[distributed.backward] the plan's order is striped, its rows stand 4 positions apart and a window has 3: "
            "gradients on a GPU take one that is no narrower");
  std::vector<float> plane(3 * 12);
  TensorView bias{plane.data(), DType::f32, {1, 1, 3, 12}};
  bias.device = Device::cuda;
  const Plan causal({.rows = 12, .ranks = 4, .causal = Causal::top_left});
  EXPECT_EQ(said([&] {
              RankAttention(causal, on_gpu, Scheme::gather)
                  .backward(q, q, q, q, lse, q, {}, {.dq = {}, .dk = {}, .dv = {}, .dsink = {}, .dbias = bias},
                            {.bias = bias});
            }),
            "[distributed.backward] dbias is given: pieces on a GPU have no gradient of a bias");
}

TEST(DistributedRefusals, RanksThatDisagreeAreToldOnEveryRank) {
  const Problem problem{.rows = 12, .ranks = 3, .causal = Causal::top_left};
  for (const std::string& what : refusals(problem, [](Share&, auto& options) { options.softcap = 2; })) {
    EXPECT_EQ(what, "[distributed.attention] ranks do not agree: softcap is 0 on rank 0 and 2 on rank 2");
  }
  const auto thrown = refusals(
      problem, [](Share&, auto&) {},
      [&](int rank) {
        Problem other = problem;
        if (rank == 1) other.causal = Causal::none;
        return other;
      });
  for (const std::string& what : thrown) {
    EXPECT_EQ(what.find("[distributed.attention] ranks do not agree: plan is "), 0u) << what;
    EXPECT_NE(what.find(" on rank 1"), std::string::npos) << what;
  }
  Problem four = problem;
  four.ranks = 4;
  const auto sizes = [&](int rank) {
    Problem other = four;
    other.ulysses = rank == 2 ? 4 : 2;
    return other;
  };
  for (const std::string& what : refusals(
           four, [](Share&, auto&) {}, sizes, Scheme::two_dimensional)) {
    EXPECT_EQ(what, "[distributed.attention] ranks do not agree: ulysses is 2 on rank 0 and 4 on rank 2");
  }
}

TEST(DistributedRefusals, ALostRankIsAnErrorOfEveryScheme) {
  const std::pair<Scheme, const char*> exchanges[] = {{Scheme::gather, "keys gathered"},
                                                      {Scheme::ring, "keys passed on, step "},
                                                      {Scheme::needed, "needed keys sent"},
                                                      {Scheme::ulysses, "rows exchanged for heads"},
                                                      {Scheme::two_dimensional, ""}};
  for (const auto& [scheme, what] : exchanges) {
    for (const bool slow : {false, true}) {
      const Problem problem{.rows = 23, .ranks = 4, .causal = Causal::top_left};
      const auto timeout = std::chrono::milliseconds(slow ? 700 : 20000);
      std::atomic<int> told = 0;
      const auto thrown = on_ranks(4, timeout, [&, scheme = scheme](Communicator& communicator) {
        const Plan plan(problem);
        const int64_t rows = plan.rows(communicator.rank());
        std::vector<float> x(static_cast<std::size_t>(rows * 4 * 8), 1), o(x.size());
        const TensorView q{x.data(), DType::f32, {1, rows, 4, 8}}, out{o.data(), DType::f32, {1, rows, 4, 8}};
        RankAttention attention(plan, communicator, scheme);
        attention.forward(q, q, q, out, {});
        communicator.barrier();
        if (communicator.rank() == 3) {
          if (!slow) throw RuntimeError("lost");
          while (told < 3) std::this_thread::sleep_for(std::chrono::milliseconds(5));
          return;
        }
        try {
          attention.forward(q, q, q, out, {});
        } catch (...) {
          ++told;
          throw;
        }
      });
      bool named = false;
      for (std::size_t rank = 0; rank < 3; ++rank) {
        EXPECT_EQ(thrown[rank].find(std::string("[distributed.attention] ") + what), 0u)
            << name_of(scheme) << ": " << thrown[rank];
        const std::string waits = ": rank " + std::to_string(rank) + " waits for rank ";
        // Exchanges inside of a group, or between groups, are of the whole plan, too.
        EXPECT_NE(thrown[rank].find(", plan " + distributed::digest_text(Plan(problem).digest()) + ": it "),
                  std::string::npos)
            << name_of(scheme) << ": " << thrown[rank];
        EXPECT_NE(thrown[rank].find(waits), std::string::npos) << name_of(scheme) << ": " << thrown[rank];
        named = named || thrown[rank].find(waits + "3, within ") != std::string::npos;
      }
      EXPECT_TRUE(named) << name_of(scheme);
    }
  }
}

TEST(DistributedCommunicator, SumsInTheOrderOfRanks) {
  // 1e8 + 1 is 1e8 in float32: the order shows.
  const float of_rank[] = {1e8f, 1, -1e8f, 3};
  const auto thrown = on_ranks(4, kTimeout, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    std::vector<float> x = {of_rank[rank], 1}, scratch(8);
    communicator.all_reduce(x, scratch, "test");
    EXPECT_EQ(x, (std::vector<float>{3, 4}));
    // Parts of different lengths, one of them empty.
    const std::vector<float> one = {of_rank[rank]}, two = {of_rank[rank], of_rank[3 - rank]};
    const std::span<const float> parts[] = {one, {}, two, one};
    std::vector<float> sum(parts[rank].size()), space(sum.size());
    communicator.reduce_scatter(parts, sum, space, "test");
    const std::vector<float> sums[] = {{3}, {}, {3, 0}, {3}};
    EXPECT_EQ(sum, sums[rank]);
    communicator.barrier();
  });
  EXPECT_EQ(thrown, std::vector<std::string>(4));
}

TEST(DistributedCommunicator, ALostRankIsAnError) {
  const auto gone = on_ranks(3, kTimeout, [](Communicator& communicator) {
    if (communicator.rank() == 2) throw RuntimeError("lost");
    std::vector<float> x(1), scratch(3);
    communicator.all_reduce(x, scratch, "sum of the test");
  });
  EXPECT_EQ(gone[0], "[distributed] sum of the test: rank 0 waits for rank 2, within 60 s: it is gone");
  EXPECT_TRUE(gone[1].find("[distributed] sum of the test: rank 1 waits for rank ") == 0) << gone[1];
  const auto slow = on_ranks(2, std::chrono::milliseconds(30), [](Communicator& communicator) {
    if (communicator.rank() == 0) communicator.barrier();
    if (communicator.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(150));
  });
  EXPECT_EQ(slow[0], "[distributed] barrier: rank 0 waits for rank 1, within 0.03 s: it has not ended");
  const auto unequal = on_ranks(2, kTimeout, [](Communicator& communicator) {
    std::vector<std::byte> in(static_cast<std::size_t>(communicator.rank() + 1)), out(1);
    communicator.exchange(out, 1 - communicator.rank(), in, 1 - communicator.rank(), "test")->wait();
  });
  EXPECT_EQ(unequal[1],
            "[distributed] test: rank 1 waits for rank 0, within 60 s: it sent 1 bytes where 2 were expected");
}

}  // namespace
}  // namespace heddle::kit
