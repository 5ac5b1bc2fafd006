// A thread that looks at exchanges in place of the host's own.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <optional>

#include "distributed/nccl/gpu.h"

namespace heddle::distributed {

// Of one stream, whose exchanges come one after the other: one has begun when what was before it is done, and those
// behind it have not until it is done itself.
class Watch {
 public:
  // fault: what has failed meanwhile, or "". failed: an exchange has, and why; called once, at the end of the watch.
  // Both are called from the thread.
  Watch(int gpu, std::chrono::milliseconds timeout, std::function<std::string()> fault,
        std::function<void(const Purpose& purpose, const std::string& waiting, const std::string& why)> failed);
  // When all exchanges are done, or one has failed; from now on those count as begun, too, that what is before them,
  // such as a graph with a rank that is lost, may keep for ever.
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // before: on the caller's stream.
  void add(Event before, Event done, Purpose purpose, std::string waiting);

 private:
  struct Exchange {
    Event before, done;
    Purpose purpose;
    std::string waiting;
    std::optional<Patience::Clock::time_point> begun;
  };
  void run();
  // Whether it is done; why: what has failed of it, or stays empty.
  bool done(Exchange& exchange, bool closing, std::string& why) const;

  const int gpu_;
  const std::chrono::milliseconds timeout_;
  const std::function<std::string()> fault_;
  const std::function<void(const Purpose&, const std::string&, const std::string&)> failed_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Exchange> exchanges_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace heddle::distributed
