// Attention over several ranks, threads here: together they are one process's call by the reference in doubles and the
// rule that judges every kernel, forward and backward, and the same bits each time.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/distributed_cases.h"
#include "kit/counted.h"
#include "kit/on_ranks.h"

namespace heddle::kit::over_ranks {
namespace {

using distributed::Communicator;
using distributed::RankAttention;
using distributed::Scheme;

constexpr auto kTimeout = std::chrono::seconds(60);

std::vector<Share> run(const Whole& whole, const Plan& plan, Scheme scheme, bool chunked) {
  const AttentionCase& spec = whole.data.spec;
  std::vector<Share> shares(static_cast<std::size_t>(plan.problem().ranks));
  const auto thrown = on_ranks(plan.problem().ranks, kTimeout, [&](Communicator& communicator) {
    Share& s = shares[static_cast<std::size_t>(communicator.rank())];
    s = share_of(whole.data, plan, communicator.rank());
    distributed::Options options;
    options.softcap = spec.softcap;
    options.alibi_slopes = whole.data.alibi.view();
    options.sink = whole.data.sink.view();
    options.bias = s.bias.view();
    options.chunked = chunked;
    RankAttention attention(plan, communicator, scheme);
    attention.forward(s.q.view(), s.k.view(), s.v.view(), s.o.view(), s.lse.view(), options);
    attention.backward(s.q.view(), s.k.view(), s.v.view(), s.o.view(), s.lse.view(), s.d_o.view(), s.d_lse.view(),
                       s.gradients(), options);
    for (const HostTensor* x : {&s.o, &s.lse, &s.dq, &s.dk, &s.dv}) EXPECT_EQ(x->damage(), "");
  });
  for (const std::string& what : thrown) EXPECT_EQ(what, "");
  return shares;
}

class DistributedAttention : public ::testing::TestWithParam<DistributedCase> {};

TEST_P(DistributedAttention, IsOneProcess) {
  const Whole whole(GetParam());
  const bool every = std::getenv("HEDDLE_EVERY_SCHEME") != nullptr;  // scripts/test_ranks.sh
  int turn = static_cast<int>(std::hash<std::string>{}(GetParam().name) % 97);
  for (const Order order : {Order::contiguous, Order::zigzag, Order::striped, Order::per_document, Order::balanced}) {
    if (order == Order::per_document && !GetParam().mask.areas.empty()) continue;
    for (const int ranks : {1, 2, 3, 4, 8}) {
      // Gathered and passed on in all, but of eight ranks; the others in turn.
      constexpr Scheme kInTurn[] = {Scheme::needed, Scheme::ulysses, Scheme::two_dimensional};
      std::vector<Scheme> schemes = {kInTurn[++turn % 3]};
      if (every) schemes.assign(std::begin(kInTurn), std::end(kInTurn));
      if (every || ranks <= 4) schemes.insert(schemes.begin(), {Scheme::gather, Scheme::ring});
      Problem problem = problem_of(GetParam(), ranks, order);
      if (ranks == 8) problem.ulysses = turn % 2 == 0 ? 2 : 4;
      const Plan plan(problem);
      for (const Scheme scheme : schemes) {
        if (!is_served(whole.data.spec, plan, scheme)) continue;
        SCOPED_TRACE(std::string(name_of(order)) + ", " + std::to_string(ranks) + " ranks, " + name_of(scheme));
        const bool chunked = turn % 2 == 0;
        const std::vector<Share> shares = run(whole, plan, scheme, chunked);
        if (HasFailure()) return;
        expect_whole(whole, plan, shares);
        if (ranks != 3 && scheme != Scheme::two_dimensional) continue;
        // Parts of the heads have the bits of all, but for what is summed over heads.
        const bool other = !whole.data.spec.bias.given || whole.data.spec.bias.heads;
        const std::vector<Share> again = run(whole, plan, scheme, other ? !chunked : chunked);
        expect_same_bits(shares, again);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, DistributedAttention, ::testing::ValuesIn(distributed_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(DistributedBytes, AreThoseOfThePlan) {
  const Mask masks[] = {{.name = "full"},
                        {.name = "causal", .causal = Causal::top_left},
                        {.name = "window", .causal = Causal::top_left, .left = 7},
                        {.name = "documents", .causal = Causal::top_left, .cu_seqlens = {0, 1, 1, 12, 30, 30, 41}}};
  constexpr Scheme kAll[] = {Scheme::gather, Scheme::ring, Scheme::needed, Scheme::ulysses, Scheme::two_dimensional};
  int turn = 0;
  for (const Mask& mask : masks) {
    for (const Order order : {Order::contiguous, Order::zigzag, Order::striped, Order::per_document, Order::balanced}) {
      for (const Scheme scheme : kAll) {
        const int ranks = 2 + ++turn % 5;
        AttentionCase spec = distributed_case_of(2, 41, 6, 3, DType::bf16);
        Problem problem = problem_of({"", spec, mask}, ranks, order);
        problem.batch = 2, problem.heads = 6, problem.kv_heads = 3;
        problem.head_size = spec.D, problem.head_size_v = spec.Dv;
        const Plan plan(problem);
        SCOPED_TRACE(std::string(mask.name) + ", " + name_of(order) + ", " + std::to_string(ranks) + " ranks, " +
                     name_of(scheme));
        const auto thrown = on_ranks(ranks, kTimeout, [&](Communicator& threads) {
          Counted counted(threads);
          const int64_t rows = plan.rows(threads.rank());
          const auto zeros = [&](int64_t heads, int64_t size) {
            HostTensor x = HostTensor::output(DType::bf16, {2, rows, heads, size});
            for (int64_t n = 0; n < x.elements(); ++n) x.set(n, 0);
            return x;
          };
          const HostTensor q = zeros(6, spec.D), k = zeros(3, spec.D), v = zeros(3, spec.Dv), o = zeros(6, spec.Dv),
                           dq = zeros(6, spec.D), dk = zeros(3, spec.D), dv = zeros(3, spec.Dv);
          const HostTensor lse = HostTensor::output(DType::f32, {2, 6, rows});
          RankAttention attention(plan, counted, scheme);
          attention.forward(q.view(), k.view(), v.view(), o.view(), lse.view());
          EXPECT_EQ(static_cast<double>(counted.bytes), plan.bytes(scheme, threads.rank()).forward);
          counted.bytes = 0;
          attention.backward(q.view(), k.view(), v.view(), o.view(), lse.view(), o.view(), {},
                             {dq.view(), dk.view(), dv.view(), {}});
          EXPECT_EQ(static_cast<double>(counted.bytes), plan.bytes(scheme, threads.rank()).backward);
        });
        EXPECT_EQ(thrown, std::vector<std::string>(thrown.size()));
      }
    }
  }
}

}  // namespace
}  // namespace heddle::kit::over_ranks
