// What becomes of an exchange over NCCL that a rank does not answer. Each test is a process of its own, as an exchange
// that has failed may leave a GPU that is of no more use to it, and one that ends by itself. Run it with
// CUDA_MODULE_LOADING=EAGER (heddle/distributed_nccl.h says why).
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/rank_memory.h"
#include "distributed/agreement.h"
#include "gpu/nccl_ranks.h"
#include "heddle/error.h"
#include "kit/deadline.h"
#include "kit/device_mirror.h"

namespace heddle::kit::over_ranks {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kShort = 5s;
const std::string kNotInTime = "within 5 s: it has not ended";

// What a body throws, or "".
std::string thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// What a process found to be wrong.
class Findings {
 public:
  void require(bool right, const std::string& what) {
    if (right) return;
    const std::lock_guard lock(mutex_);
    said_ += what + "\n";
  }
  void require_equal(const std::string& found, const std::string& right) {
    require(found == right, "it is \"" + found + "\" and must be \"" + right + "\"");
  }
  void require_none(const std::vector<std::string>& thrown) {
    for (const std::string& what : thrown) require_equal(what, "");
  }
  [[noreturn]] void end() const {
    std::fputs(said_.c_str(), stderr);
    std::_Exit(said_.empty() ? 0 : 1);
  }

 private:
  std::mutex mutex_;
  std::string said_;
};

[[noreturn]] void judge(const std::function<void(Findings&)>& body) {
  const Deadline deadline(120s);
  Findings findings;
  findings.require_equal(thrown_by([&] { body(findings); }), "");
  findings.end();
}

void expect_right(const std::function<void(Findings&)>& body) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";  // from main() on: nothing of CUDA survives a fork
  EXPECT_EXIT(judge(body), ::testing::ExitedWithCode(0), "");
}

struct Message {
  DeviceMemory memory{64, 0};
  DeviceStream stream;
  std::byte* bytes = static_cast<std::byte*>(memory.data());

  // Sends 16 bytes to a rank, and gets as many.
  std::unique_ptr<distributed::Transfer> exchange(Communicator& communicator, int with) {
    communicator.use_stream(stream.get());
    return communicator.exchange({bytes, 16}, with, {bytes + 16, 16}, with, "message of the test");
  }
};

// Rank 1 does not answer the second exchange. of(rank): its communicator.
void lose_a_rank(Findings& findings, int rank, const std::function<void()>& meet, Communicator& communicator,
                 bool host_waits) {
  Message message;
  message.exchange(communicator, 1 - rank)->wait();
  message.stream.synchronize();
  meet();
  if (rank == 0) {
    const std::string lost = "[distributed] message of the test: rank 0 waits for rank 1, " + kNotInTime;
    const auto began = Clock::now();
    const std::string of_wait = thrown_by([&] { message.exchange(communicator, 1)->wait(); });
    const auto waited = Clock::now() - began;
    findings.require_equal(of_wait, host_waits ? lost : "");
    findings.require(host_waits ? waited >= kShort : waited < kShort / 2,
                     "the host was in the call for " +
                         std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(waited).count()) + " ms");
    const std::string of_stream = thrown_by([&] { message.stream.synchronize(); });
    findings.require(of_stream.empty() == host_waits, "the stream ends with \"" + of_stream + "\"");
    findings.require_equal(thrown_by([&] { communicator.throw_if_failed(); }), lost);
    findings.require_equal(thrown_by([&] { message.exchange(communicator, 1); }), lost);
    findings.require_equal(thrown_by([&] { communicator.barrier(); }), lost);
    if (host_waits) {
      int number = 17;
      message.memory.write(0, &number, sizeof number);
      number = 0;
      message.memory.read(0, &number, sizeof number);
      findings.require(number == 17, "the GPU cannot be used");
    }
  }
  meet();
}

class GpuDistributedWatchLosesARank : public ::testing::TestWithParam<bool> {};

TEST_P(GpuDistributedWatchLosesARank, WithAnError) {
  if (too_few_gpus(2)) GTEST_SKIP() << why_too_few(2);
  const bool host_waits = GetParam();
  expect_right([&](Findings& findings) {
    Ranks ranks(2, {.timeout = kShort, .host_waits = host_waits});
    findings.require_none(ranks.thrown());
    findings.require_none(ranks.each([&](int rank, std::barrier<>& together) {
      lose_a_rank(
          findings, rank, [&] { together.arrive_and_wait(); }, ranks.of(rank), host_waits);
    }));
  });
}

// Afterwards the communicator is its owner's to abort, or is gone.
TEST_P(GpuDistributedWatchLosesARank, WithAnErrorOfACallersCommunicator) {
  if (too_few_gpus(2)) GTEST_SKIP() << why_too_few(2);
  const bool host_waits = GetParam();
  expect_right([&](Findings& findings) {
    ncclUniqueId id;
    findings.require(ncclGetUniqueId(&id) == ncclSuccess, "there is no id");
    std::barrier together(2);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        const std::string thrown = thrown_by([&] {
          cuda::exchange_current_gpu(rank);
          ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
          config.blocking = 0;
          ncclComm_t comm = nullptr;
          ncclCommInitRankConfig(&comm, 2, id, rank, &config);
          ncclResult_t state = ncclInProgress;
          while (state == ncclInProgress) {
            if (ncclCommGetAsyncError(comm, &state) != ncclSuccess) state = ncclInternalError;
            std::this_thread::yield();
          }
          findings.require(state == ncclSuccess, "there is no communicator");
          {
            const auto communicator = nccl_communicator(comm, {.timeout = kShort, .host_waits = host_waits});
            lose_a_rank(
                findings, rank, [&] { together.arrive_and_wait(); }, *communicator, host_waits);
          }
          if (rank == 1 || !host_waits) ncclCommAbort(comm);
        });
        findings.require_equal(thrown, "");
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, GpuDistributedWatchLosesARank, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "host_waits" : "watched"; });

TEST(GpuDistributedWatch, IsThereByDefaultForTenMinutes) {
  EXPECT_EQ(NcclOptions{}.timeout, std::chrono::minutes(10));
  EXPECT_FALSE(NcclOptions{}.host_waits);
}

TEST(GpuDistributedWatch, ARankThatDoesNotComeIsAnError) {
  for (const bool host_waits : {false, true}) {
    expect_right([&](Findings& findings) {
      const std::string said = thrown_by(
          [&] { nccl_communicator(distributed::new_nccl_id(), 2, 0, {.timeout = kShort, .host_waits = host_waits}); });
      findings.require_equal(said, "[distributed] communicator made: rank 0 waits for the other ranks, " + kNotInTime);
    });
  }
}

// What attention says is the reason, not what CUDA makes of it.
TEST(GpuDistributedWatch, AttentionNamesTheRank) {
  if (too_few_gpus(2)) GTEST_SKIP() << why_too_few(2);
  expect_right([](Findings& findings) {
    Ranks ranks(2, {.timeout = kShort});
    findings.require_none(ranks.thrown());
    const distributed::Plan plan({.rows = 32, .ranks = 2, .causal = Causal::top_left});
    const HostTensor rows = HostTensor::output(DType::f32, {1, 16, 2, 16});
    findings.require_none(ranks.each([&](int rank, std::barrier<>& together) {
      ranks.of(rank).barrier();
      if (rank == 0) {
        const DeviceTensor q(rows), o(rows);
        const DeviceStream stream;
        Runtime runtime;
        runtime.stream = stream.get();
        distributed::RankAttention attention(plan, ranks.of(0), distributed::Scheme::gather);
        for (int time = 0; time < 2; ++time) {
          findings.require_equal(
              thrown_by([&] { attention.forward(q.view(), q.view(), q.view(), o.view(), {}, {}, runtime); }),
              "[distributed.attention] plans compared: rank 0 waits for rank 1, within 5 s, plan " +
                  distributed::digest_text(plan.digest()) + ": it has not ended");
        }
      }
      together.arrive_and_wait();
    }));
  });
}

// Time runs from the exchange's begin on: the stream is busy for longer than the timeout before.
TEST(GpuDistributedWatch, WaitsForWhatIsBeforeAnExchange) {
  expect_right([](Findings& findings) {
    Ranks ranks(1, {.timeout = 2s});
    findings.require_none(ranks.thrown());
    findings.require_none(ranks.each([&](int, std::barrier<>&) {
      Message message;
      message.exchange(ranks.of(0), 0)->wait();
      message.stream.synchronize();
      const auto sleep = [](void*) { std::this_thread::sleep_for(4s); };
      findings.require(
          cudaLaunchHostFunc(static_cast<cudaStream_t>(message.stream.get()), sleep, nullptr) == cudaSuccess,
          "nothing sleeps");
      message.exchange(ranks.of(0), 0)->wait();
      message.stream.synchronize();
      ranks.of(0).throw_if_failed();
    }));
  });
}

// A rank that is slower than others but in time; many exchanges are on their way at once.
TEST(GpuDistributedWatch, WaitsForASlowRank) {
  if (too_few_gpus(2)) GTEST_SKIP() << why_too_few(2);
  expect_right([](Findings& findings) {
    constexpr int kTimes = 200;
    Ranks ranks(2, {.timeout = kShort});
    findings.require_none(ranks.thrown());
    findings.require_none(ranks.each([&](int rank, std::barrier<>& together) {
      const DeviceMemory came(kTimes * sizeof(int), 0);
      DeviceMemory sent(kTimes * sizeof(int));
      const DeviceStream stream;
      Communicator& communicator = ranks.of(rank);
      communicator.use_stream(stream.get());
      std::vector<int> numbers(kTimes), found(kTimes), right(kTimes);
      std::iota(numbers.begin(), numbers.end(), 1000 * rank);
      std::iota(right.begin(), right.end(), 1000 * (1 - rank));
      sent.write(0, numbers.data(), sent.bytes());
      communicator.barrier();
      together.arrive_and_wait();
      if (rank == 1) std::this_thread::sleep_for(kShort / 2);
      for (std::size_t n = 0; n < kTimes; ++n) {
        communicator
            .exchange({static_cast<const std::byte*>(sent.data()) + n * sizeof(int), sizeof(int)}, 1 - rank,
                      {static_cast<std::byte*>(came.data()) + n * sizeof(int), sizeof(int)}, 1 - rank, "test")
            ->wait();
      }
      stream.synchronize();
      together.arrive_and_wait();
      came.read(0, found.data(), came.bytes());
      findings.require(found == right, "rank " + std::to_string(rank) + " got other numbers");
      communicator.throw_if_failed();
    }));
  });
}

TEST(GpuDistributedWatch, EndsTheGpuOnlyIfToldTo) {
  expect_right([](Findings& findings) {
    int* failed = nullptr;
    findings.require(cudaHostAlloc(reinterpret_cast<void**>(&failed), sizeof(int), cudaHostAllocMapped) == cudaSuccess,
                     "there is no memory");
    const DeviceStream stream;
    *failed = 0;
    cuda::end_if(failed, stream.get());
    findings.require_equal(thrown_by([&] { stream.synchronize(); }), "");
    *failed = 1;
    cuda::end_if(failed, stream.get());
    findings.require(!thrown_by([&] { stream.synchronize(); }).empty(), "the GPU went on");
    findings.require(cudaDeviceSynchronize() != cudaSuccess, "CUDA can still be called");
  });
}

}  // namespace
}  // namespace heddle::kit::over_ranks
