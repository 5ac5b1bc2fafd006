// Attention over MPI's processes: the cases of ranks that are threads, by the reference in doubles and the rule that
// judges every kernel, and the same bits each time. A part of them, unless HEDDLE_EVERY_SCHEME is set.
#include <gtest/gtest.h>
#include <mpi.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "heddle/distributed_mpi.h"
#include "kernels/distributed_cases.h"
#include "mpi/job.h"

namespace heddle::kit::over_ranks {
namespace {

using distributed::Communicator;
using distributed::RankAttention;
using distributed::Scheme;

constexpr Scheme kSchemes[] = {Scheme::gather, Scheme::ring, Scheme::needed, Scheme::ulysses, Scheme::two_dimensional};
constexpr int kTakenOf = 6;  // ctest's share is every sixth

// Ends the job where this rank cannot go on with the others.
template <class Body>
void together(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", job().rank(), error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
}

Share run(const CaseData& data, const Plan& plan, Scheme scheme) {
  Share s = share_of(data, plan, job().rank());
  distributed::Options options;
  options.softcap = data.spec.softcap;
  options.alibi_slopes = data.alibi.view();
  options.sink = data.sink.view();
  options.bias = s.bias.view();
  options.chunked = plan.problem().order == Order::zigzag;
  RankAttention attention(plan, job(), scheme);
  attention.forward(s.q.view(), s.k.view(), s.v.view(), s.o.view(), s.lse.view(), options);
  attention.backward(s.q.view(), s.k.view(), s.v.view(), s.o.view(), s.lse.view(), s.d_o.view(), s.d_lse.view(),
                     s.gradients(), options);
  for (const HostTensor* x : {&s.o, &s.lse, &s.dq, &s.dk, &s.dv}) EXPECT_EQ(x->damage(), "");
  return s;
}

// Of all ranks on rank 0, else nothing.
std::vector<Share> gathered(const CaseData& data, const Plan& plan, const Share& own) {
  std::vector<Share> out;
  for (int rank = 0; rank < job().size(); ++rank) {
    if (job().rank() != 0 && job().rank() != rank) continue;
    Share there = rank == job().rank() ? own : share_of(data, plan, rank);
    for (HostTensor* x : {&there.o, &there.lse, &there.dq, &there.dk, &there.dv, &there.dsink, &there.dbias}) {
      if (rank == 0 || !x->given()) continue;
      std::vector<double> values = x->values();
      const std::span<std::byte> bytes = std::as_writable_bytes(std::span(values));
      const bool sends = job().rank() != 0;
      job()
          .exchange(sends ? bytes : std::span<std::byte>(), 0, sends ? std::span<std::byte>() : bytes, rank, "result")
          ->wait();
      for (std::size_t n = 0; n < values.size() && !sends; ++n) x->set(static_cast<int64_t>(n), values[n]);
    }
    if (job().rank() == 0) out.push_back(std::move(there));
  }
  return out;
}

class DistributedOverMpi : public ::testing::TestWithParam<DistributedCase> {};

TEST_P(DistributedOverMpi, IsOneProcess) {
  const DistributedCase& c = GetParam();
  const CaseData data(c.spec);
  std::optional<Whole> whole;  // of rank 0, which judges
  const int ranks = job().size();
  for (const Order order : {Order::contiguous, Order::zigzag, Order::striped, Order::per_document, Order::balanced}) {
    if (order == Order::per_document && !c.mask.areas.empty()) continue;
    for (const Scheme scheme : kSchemes) {
      const std::string what =
          std::string(name_of(order)) + ", " + std::to_string(ranks) + " ranks, " + name_of(scheme);
      if (!in_turn(c.name + ", " + what + ", " + job().name(), kTakenOf)) continue;
      SCOPED_TRACE(what);
      Problem problem = problem_of(c, ranks, order);
      if (ranks == 8) problem.ulysses = order == Order::zigzag ? 2 : 4;
      const Plan plan(problem);
      if (!is_served(c.spec, plan, scheme)) continue;
      together([&] {
        const Share own = run(data, plan, scheme);
        expect_same_bits({own}, {run(data, plan, scheme)});
        const std::vector<Share> shares = gathered(data, plan, own);
        if (job().rank() != 0) return;
        if (!whole) whole.emplace(c);
        expect_whole(*whole, plan, shares);
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, DistributedOverMpi, ::testing::ValuesIn(distributed_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(DistributedMpi, ALostRankIsAnError) {
  if (job().size() < 2) GTEST_SKIP() << "nobody is waited for";
  const int world = MPI_Comm_c2f(MPI_COMM_WORLD);
  const auto impatient = distributed::mpi_communicator(world, std::chrono::milliseconds(200));
  std::vector<std::byte> bytes(2);
  if (job().rank() == 0) {
    try {
      impatient->exchange({}, 1, bytes, 1, {"message of the test", "test", "25727c32a69e0bdf"})->wait();
      ADD_FAILURE() << "nobody sent it";
    } catch (const RuntimeError& error) {
      EXPECT_EQ(std::string(error.what()),
                "[test] message of the test: rank 0 waits for rank 1, within 0.2 s, plan 25727c32a69e0bdf: it has not "
                "ended");
    }
  }
  job().barrier();
}

TEST(DistributedMpi, AMessageOfAnotherLengthIsAnError) {
  if (job().size() < 2) GTEST_SKIP() << "nobody sends";
  std::vector<std::byte> bytes(2);
  if (job().rank() == 1) job().exchange(std::span(bytes).first(1), 0, {}, 0, "test")->wait();
  if (job().rank() == 0) {
    try {
      job().exchange({}, 1, bytes, 1, "test")->wait();
      ADD_FAILURE() << "it was shorter";
    } catch (const RuntimeError& error) {
      EXPECT_EQ(std::string(error.what()),
                "[distributed] test: rank 0 waits for rank 1, within 60 s: it sent 1 bytes where 2 were expected");
    }
  }
  job().barrier();
}

// All processes of the test are on one machine.
TEST(DistributedMpi, ProcessesOfAMachineAreNumbered) {
  EXPECT_EQ(distributed::mpi_local_rank(MPI_Comm_c2f(MPI_COMM_WORLD)), job().rank());
}

TEST(DistributedMpi, RefusesInWords) {
  const auto refused = [](std::chrono::milliseconds timeout) -> std::string {
    try {
      distributed::mpi_communicator(MPI_Comm_c2f(MPI_COMM_WORLD), timeout);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refused(std::chrono::milliseconds(0)),
            "[distributed.mpi_communicator] timeout is 0 ms: it must be above 0");
}

}  // namespace
}  // namespace heddle::kit::over_ranks
