// Continuous batching: one thread decodes for all requests, each step with those that are there then.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "decoder.h"

namespace example {

struct Request {
  std::string prompt;       // at least a byte
  std::int64_t tokens = 0;  // to make, at least 1
  double temperature = 0;   // 0: the likeliest token
  std::uint64_t seed = 0;   // of what is drawn
};

struct Event {
  enum class Kind { token, finished, stopped } kind = Kind::token;
  int token = 0;
  float logprob = 0;  // of the token, at temperature 1
};

// The way from the loop to a request's reader.
class Stream {
 public:
  // The next event, if one comes within the time. After one that is no token there are no more.
  std::optional<Event> next(std::chrono::milliseconds patience);
  // The reader has gone: the loop drops the request after the step that it is in.
  void cancel() { cancelled_ = true; }

 private:
  friend class Scheduler;
  void push(const Event& event);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Event> events_;
  std::atomic<bool> cancelled_ = false;
};

struct Metrics {
  std::int64_t queued = 0, active = 0, pages_free = 0, pages = 0;
  std::int64_t tokens = 0, finished = 0, cancelled = 0, stopped = 0, refused = 0;  // since the start
  double tokens_per_second = 0;                                                    // of the last kRateSeconds
};
inline constexpr double kRateSeconds = 10;

class Scheduler {
 public:
  // queue: requests that wait, at most.
  Scheduler(Decoder& decoder, std::int64_t queue);
  ~Scheduler() { stop(std::chrono::milliseconds(0)); }

  // Why such a request can never be served, a sentence; empty if it can.
  std::string refusal(const Request& request) const;
  // For a request that can be served. Null: the queue is full, or the scheduler is stopping.
  std::shared_ptr<Stream> submit(Request request);
  // Takes no more requests, gives those that it has `grace` to finish, ends the others with Event::Kind::stopped.
  void stop(std::chrono::milliseconds grace);
  bool stopping() const;
  Metrics metrics() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Job {
    Request request;
    std::shared_ptr<Stream> stream;
    CachedSequence place;
    std::int64_t prefilled = 0;  // bytes of the prompt in the cache
    std::int64_t made = 0;       // tokens
    std::uint8_t last = 0;       // the newest, not yet in the cache
    bool done() const { return made == request.tokens; }
  };

  void loop();
  bool take_jobs();
  void prefill(Job& job);
  void decode(const std::vector<Job*>& jobs);
  void emit(Job& job, std::span<const float> logits);
  void retire();
  void release(Job& job);
  std::int64_t pages_for(const Request& request) const;

  Decoder& decoder_;
  const std::int64_t queue_limit_;
  std::vector<std::unique_ptr<Job>> active_;  // in order of arrival; the loop's own

  mutable std::mutex mutex_;  // of all below
  std::condition_variable arrived_;
  std::deque<std::unique_ptr<Job>> queue_;
  std::vector<std::int32_t> free_pages_;
  std::optional<Clock::time_point> deadline_;  // given: stopping
  Metrics metrics_;                            // its counts
  std::deque<Clock::time_point> recent_;       // when each token of the last kRateSeconds was made
  std::thread thread_;
};

}  // namespace example
