// Ranks that are threads of one process: messages are copied into a box for each pair of ranks.
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>

#include "distributed/named.h"

namespace heddle::distributed {
namespace {

class Boxes {
 public:
  Boxes(int size, std::chrono::milliseconds timeout)
      : size_(size), timeout_(timeout), gone_(static_cast<std::size_t>(size)), boxes_(gone_.size() * gone_.size()) {}

  int size() const { return size_; }

  void put(int from, int to, std::span<const std::byte> message) {
    {
      const std::lock_guard lock(mutex_);
      box(from, to).emplace_back(message.begin(), message.end());
    }
    changed_.notify_all();
  }

  void take(int from, int to, std::span<std::byte> into, const Purpose& purpose) {
    std::unique_lock lock(mutex_);
    std::deque<std::vector<std::byte>>& messages = box(from, to);
    const bool came = changed_.wait_for(lock, timeout_, [&] { return !messages.empty() || gone(from); });
    const auto failed = [&](const std::string& why) {
      return RuntimeError(lost(purpose, waiting(to, true, from), timeout_, why));
    };
    if (messages.empty()) throw failed(came ? "it is gone" : kNotInTime);
    const std::vector<std::byte> message = std::move(messages.front());
    messages.pop_front();
    if (message.size() != into.size()) {
      throw failed(text("it sent ", message.size(), " bytes where ", into.size(), " were expected"));
    }
    std::memcpy(into.data(), message.data(), into.size());
  }

  void leave(int rank) {
    {
      const std::lock_guard lock(mutex_);
      gone_[static_cast<std::size_t>(rank)] = true;
    }
    changed_.notify_all();
  }

 private:
  std::deque<std::vector<std::byte>>& box(int from, int to) {
    return boxes_[static_cast<std::size_t>(from) * gone_.size() + static_cast<std::size_t>(to)];
  }
  bool gone(int rank) const { return gone_[static_cast<std::size_t>(rank)]; }

  const int size_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> gone_;
  std::vector<std::deque<std::vector<std::byte>>> boxes_;
};

class Receipt : public Transfer {
 public:
  Receipt(Boxes& boxes, int from, int to, std::span<std::byte> in, Purpose purpose)
      : boxes_(boxes), from_(from), to_(to), in_(in), purpose_(std::move(purpose)) {}
  void wait() override {
    if (in_.empty()) return;
    boxes_.take(from_, to_, in_, purpose_);
    in_ = {};
  }

 private:
  Boxes& boxes_;
  int from_, to_;
  std::span<std::byte> in_;
  Purpose purpose_;
};

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Boxes> boxes, int rank) : boxes_(std::move(boxes)), rank_(rank) {}
  ~ThreadCommunicator() override { boxes_->leave(rank_); }
  int rank() const override { return rank_; }
  int size() const override { return boxes_->size(); }
  const char* name() const override { return "threads"; }
  std::unique_ptr<Transfer> exchange(std::span<const std::byte> out, int to, std::span<std::byte> in, int from,
                                     const Purpose& purpose) override {
    if (!out.empty()) boxes_->put(rank_, to, out);
    return std::make_unique<Receipt>(*boxes_, from, rank_, in, purpose);
  }

 private:
  std::shared_ptr<Boxes> boxes_;
  int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> thread_communicators(int size, std::chrono::milliseconds timeout) {
  const Check check("distributed.thread_communicators");
  check.require(size >= 1, "size is ", size, ": it must be at least 1");
  check.require(timeout.count() > 0, "timeout is ", timeout.count(), " ms: it must be above 0");
  const auto boxes = std::make_shared<Boxes>(size, timeout);
  std::vector<std::unique_ptr<Communicator>> out;
  for (int rank = 0; rank < size; ++rank) out.push_back(std::make_unique<ThreadCommunicator>(boxes, rank));
  return out;
}

}  // namespace heddle::distributed
