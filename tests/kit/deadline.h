// An end to a test that would wait for ever.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace heddle::kit {

// Ends the process unless it is gone by then.
class Deadline {
 public:
  explicit Deadline(std::chrono::seconds limit)
      : thread_([this, limit] {
          std::unique_lock lock(mutex_);
          if (changed_.wait_for(lock, limit, [this] { return gone_; })) return;
          std::fprintf(stderr, "the test has not ended within %lld s\n", static_cast<long long>(limit.count()));
          std::_Exit(3);
        }) {}
  ~Deadline() {
    {
      const std::lock_guard lock(mutex_);
      gone_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool gone_ = false;
  std::thread thread_;
};

}  // namespace heddle::kit
