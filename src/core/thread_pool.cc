#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <string_view>
#include <thread>
#include <utility>

#include <hwy/cache_control.h>
#include <unistd.h>

#include "core/check.h"
#include "core/os/os.h"
#include "heddle/runtime.h"

namespace heddle {
namespace {

// Between jobs a thread spins for kSpin, then sleeps: jobs of one model follow each other within microseconds, and
// waking a sleeper costs tens of them. Inside a job the threads draw indices from one counter.
class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(int threads) : workers_(threads) {
    try {
      threads_.reserve(static_cast<std::size_t>(threads) - 1);
      for (int worker = 1; worker < threads; ++worker) threads_.emplace_back([this, worker] { serve(worker); });
    } catch (const std::exception& failure) {
      const std::size_t reached = threads_.size() + 1;
      stop();
      throw RuntimeError(text("[heddle] ", threads, " threads are wanted and ", reached, " were reached: ",
                              failure.what(), "; set_num_threads or HEDDLE_NUM_THREADS asks for fewer"));
    }
  }

  ~ThreadPool() override { stop(); }

  int workers() const override { return workers_; }

  void parallel_for(std::int64_t count, const std::function<void(std::int64_t, int)>& task) override {
    if (count <= 0) return;
    // A task that calls parallel_for would wait for itself; run its loop in place instead, as the worker it already is.
    if (inside_ == this) {
      for (std::int64_t i = 0; i < count; ++i) task(i, inside_worker_);
      return;
    }
    std::lock_guard one_caller(caller_);
    if (workers_ == 1 || count == 1) {
      const Inside inside(this, 0);
      for (std::int64_t i = 0; i < count; ++i) task(i, 0);
      return;
    }
    task_ = &task;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    failure_ = nullptr;
    busy_.store(workers_ - 1, std::memory_order_relaxed);
    {
      std::lock_guard lock(mutex_);
      job_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    draw(0);
    const auto finished = [this] { return busy_.load(std::memory_order_acquire) == 0; };
    if (!spin_until(finished)) {
      std::unique_lock lock(mutex_);
      done_.wait(lock, finished);
    }
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  static constexpr auto kSpin = std::chrono::microseconds(50);

  // Ends and joins the threads that were started.
  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_.store(true);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  // Marks the thread as a worker of this pool while it runs tasks.
  struct Inside {
    Inside(const ThreadPool* pool, int worker) {
      inside_ = pool;
      inside_worker_ = worker;
    }
    ~Inside() { inside_ = nullptr; }
  };

  template <class Condition>
  static bool spin_until(const Condition& condition) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < 64; ++i) {
        if (condition()) return true;
        hwy::Pause();
      }
    } while (std::chrono::steady_clock::now() < end);
    return condition();
  }

  void draw(int worker) {
    const Inside inside(this, worker);
    for (;;) {
      const std::int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
      if (index >= count_) break;
      try {
        (*task_)(index, worker);
      } catch (...) {
        std::lock_guard lock(mutex_);
        if (!failure_) failure_ = std::current_exception();
        next_.store(count_, std::memory_order_relaxed);
      }
    }
  }

  void serve(int worker) {
    std::uint64_t seen = 0;
    const auto called = [&] { return stopping_.load() || job_.load(std::memory_order_acquire) != seen; };
    for (;;) {
      if (!spin_until(called)) {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, called);
      }
      if (stopping_.load()) return;
      seen = job_.load(std::memory_order_acquire);
      draw(worker);
      if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        std::lock_guard lock(mutex_);
        done_.notify_one();
      }
    }
  }

  static thread_local const ThreadPool* inside_;
  static thread_local int inside_worker_;

  const int workers_;
  std::vector<std::thread> threads_;
  std::mutex caller_, mutex_;
  std::condition_variable wake_, done_;
  std::atomic<bool> stopping_{false};
  std::atomic<std::uint64_t> job_{0};
  std::atomic<int> busy_{0};
  const std::function<void(std::int64_t, int)>* task_ = nullptr;
  std::int64_t count_ = 0;
  std::atomic<std::int64_t> next_{0};
  std::exception_ptr failure_;
};

thread_local const ThreadPool* ThreadPool::inside_ = nullptr;
thread_local int ThreadPool::inside_worker_ = 0;

int threads_from_environment() {
  const char* value = std::getenv("HEDDLE_NUM_THREADS");
  if (value == nullptr || *value == '\0') return std::min(os::processors(), kMaxThreads);
  char* end = nullptr;
  const long threads = std::strtol(value, &end, 10);
  if (*end != '\0' || threads < 1 || threads > kMaxThreads) {
    throw RuntimeError(
        text("HEDDLE_NUM_THREADS is '", value, "': it must be a number of threads from 1 to ", kMaxThreads));
  }
  return static_cast<int>(threads);
}

void require_threads(std::string_view operation, int threads) {
  Check(operation).require(threads >= 1 && threads <= kMaxThreads, "threads is ", threads, ": it must be from 1 to ",
                           kMaxThreads);
}

// A child process has none of its parent's threads, so a pool inherited through fork() is left alone and replaced.
struct DefaultPool {
  std::mutex mutex;
  std::unique_ptr<Executor> pool;
  pid_t owner = 0;
  int threads = 0;
};

DefaultPool& default_pool() {
  static auto* pool = new DefaultPool;  // never destroyed: threads of the host may still use it at exit
  return *pool;
}

}  // namespace

std::unique_ptr<Executor> make_thread_pool(int threads) {
  require_threads("make_thread_pool", threads);
  return std::make_unique<ThreadPool>(threads);
}

Executor& default_executor() {
  DefaultPool& shared = default_pool();
  std::lock_guard lock(shared.mutex);
  if (shared.threads == 0) shared.threads = threads_from_environment();
  if (!shared.pool || shared.owner != getpid()) {
    (void)shared.pool.release();
    shared.pool = make_thread_pool(shared.threads);
    shared.owner = getpid();
  }
  return *shared.pool;
}

int num_threads() { return default_executor().workers(); }

void set_num_threads(int threads) {
  require_threads("set_num_threads", threads);
  DefaultPool& shared = default_pool();
  std::lock_guard lock(shared.mutex);
  if (shared.owner != getpid()) (void)shared.pool.release();
  shared.threads = threads;
  shared.pool.reset();
}

WorkspaceBuffer::~WorkspaceBuffer() { std::free(data_); }

Workspace WorkspaceBuffer::get(std::size_t bytes) {
  if (bytes > bytes_) {
    std::free(data_);
    data_ = nullptr;
    bytes_ = 0;
    const std::size_t rounded = (bytes + 63) / 64 * 64;
    data_ = std::aligned_alloc(64, rounded);
    if (data_ == nullptr) throw std::bad_alloc();
    bytes_ = rounded;
  }
  return {data_, bytes_};
}

const char* version() { return HEDDLE_VERSION; }

}  // namespace heddle
