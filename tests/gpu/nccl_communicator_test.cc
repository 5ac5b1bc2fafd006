// Communicators over NCCL: a caller's, and what they refuse. Run it with
// CUDA_MODULE_LOADING=EAGER (heddle/distributed_nccl.h says why).
#include <gtest/gtest.h>
#include <nccl.h>

#include <functional>
#include <string>
#include <vector>

#include "gpu/nccl_ranks.h"
#include "heddle/error.h"
#include "kit/device_mirror.h"

namespace heddle::kit::over_ranks {
namespace {

using distributed::Plan;
using distributed::RankAttention;
using distributed::Scheme;

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
  const HostTensor host = HostTensor::output(DType::f32, {1, 8, 2, 8});
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
    const DeviceTensor q(host);
    EXPECT_EQ(said([&] { distributed::RankDecode decode(ranks.of(0)); }),
              "[distributed.decode] messages by NCCL lie on a GPU: decoding over ranks is on the CPU so far");
    const DeviceStream stream;
    std::string what;
    const DeviceGraph graph(stream, [&] {
      ranks.of(0).use_stream(stream.get());
      std::byte* const data = static_cast<std::byte*>(q.view().data);
      what = said([&] { ranks.of(0).exchange({data, 4}, 0, {data + 4, 4}, 0, "test")->wait(); });
    });
    EXPECT_EQ(
        what,
        "[distributed] test: the stream is captured and host_waits is true: the host would wait for what does not "
        "run yet");
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
  EXPECT_EQ(
      refused([] { nccl_communicator(NcclId{}, 2, 0, {.timeout = {}, .host_waits = true}); }),
      "[distributed.nccl_communicator] host_waits is true and there is no timeout: the host would wait for a lost "
      "rank for ever");
  EXPECT_EQ(refused([] { nccl_communicator(NcclId{}, 2, 0, {.multiprocessors = -1}); }),
            "[distributed.nccl_communicator] multiprocessors is -1: it must be at least 1, or 0 for NCCL's choice");
  EXPECT_EQ(refused([] { nccl_communicator(nullptr); }),
            "[distributed.nccl_communicator] comm is null: it must be an ncclComm_t");
}

}  // namespace
}  // namespace heddle::kit::over_ranks
