// What exchanges by NCCL need of CUDA: errors, events that are used again, and a wait that ends.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "distributed/named.h"

namespace heddle::distributed {

inline void check_cuda(cudaError_t status, const Purpose& purpose) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // not left for the next call to trip over
  throw RuntimeError(text(beginning(purpose), "CUDA: ", cudaGetErrorString(status)));
}

// Asks until there is an answer or time is over.
class Patience {
 public:
  using Clock = std::chrono::steady_clock;
  explicit Patience(const std::optional<std::chrono::milliseconds>& timeout) {
    if (timeout) end_ = Clock::now() + *timeout;
  }
  bool over() const { return Clock::now() > end_; }
  void pause() {
    if (++tries_ < kBusyTries) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

 private:
  static constexpr int kBusyTries = 1000;
  Clock::time_point end_ = Clock::time_point::max();
  int tries_ = 0;
};

// Events, each used again when nobody has it. One that a stream was told to wait for may be: a wait is for what was
// recorded before it.
using Event = std::shared_ptr<std::remove_pointer_t<cudaEvent_t>>;
class Events {
 public:
  Events() = default;
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;
  ~Events() {
    for (const cudaEvent_t event : free_) cudaEventDestroy(event);
  }
  // Recorded on the stream, by any thread.
  Event recorded(cudaStream_t stream, const Purpose& purpose) {
    cudaEvent_t event = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        event = free_.back();
        free_.pop_back();
      }
    }
    if (event == nullptr) check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), purpose);
    const Event out(event, [this](cudaEvent_t used) {
      const std::lock_guard lock(mutex_);
      free_.push_back(used);
    });
    check_cuda(cudaEventRecord(event, stream), purpose);
    return out;
  }

 private:
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

}  // namespace heddle::distributed
