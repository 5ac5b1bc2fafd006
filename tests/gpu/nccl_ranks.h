// Ranks that are GPUs, a thread of this process for each.
#pragma once

#include <barrier>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/backend.h"
#include "cuda/stream_memory.h"
#include "heddle/distributed_nccl.h"

namespace heddle::kit::over_ranks {

using distributed::Communicator;
using distributed::nccl_communicator;
using distributed::NcclId;
using distributed::NcclOptions;

// With an error in the call itself, behind which the GPU can still be used.
inline constexpr NcclOptions kPatient{.timeout = std::chrono::seconds(60), .host_waits = true};

inline bool too_few_gpus(int ranks) { return std::ssize(cuda::gpus().list) < ranks; }
inline std::string why_too_few(int ranks) {
  return std::to_string(ranks) + " ranks need a GPU each, and there are " + std::to_string(cuda::gpus().list.size());
}

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

}  // namespace heddle::kit::over_ranks
