#include "distributed/nccl/watch.h"

#include <algorithm>
#include <utility>

namespace heddle::distributed {

Watch::Watch(int gpu, std::chrono::milliseconds timeout, std::function<std::string()> fault,
             std::function<void(const Purpose&, const std::string&, const std::string&)> failed)
    : gpu_(gpu), timeout_(timeout), fault_(std::move(fault)), failed_(std::move(failed)), thread_([this] { run(); }) {}

Watch::~Watch() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Watch::add(Event before, Event done, Purpose purpose, std::string waiting) {
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    first = exchanges_.empty();
    exchanges_.push_back({std::move(before), std::move(done), std::move(purpose), std::move(waiting), {}});
  }
  if (first) changed_.notify_all();  // else it looks again by itself
}

void Watch::run() {
  using namespace std::chrono_literals;
  cudaSetDevice(gpu_);
  // Else a question about an event would spoil what any thread captures in the global mode.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  const std::chrono::milliseconds pause = std::clamp<std::chrono::milliseconds>(timeout_ / 50, 1ms, 20ms);
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return closing_ || !exchanges_.empty(); });
    if (exchanges_.empty()) return;
    Exchange& first = exchanges_.front();  // stays where it is while others come
    const bool closing = closing_;
    lock.unlock();
    std::string why;
    const bool is_done = done(first, closing, why);
    if (!why.empty()) {
      failed_(first.purpose, first.waiting, why);
      return;
    }
    lock.lock();
    if (is_done) {
      exchanges_.pop_front();
    } else {
      changed_.wait_for(lock, pause);
    }
  }
}

bool Watch::done(Exchange& exchange, bool closing, std::string& why) const {
  const cudaError_t status = cudaEventQuery(exchange.done.get());
  if (status == cudaSuccess) return true;
  if (status != cudaErrorNotReady) {
    why = text("CUDA says: ", cudaGetErrorString(status));
    return false;
  }
  why = fault_();
  if (!why.empty()) return false;
  const auto now = Patience::Clock::now();
  if (!exchange.begun && (closing || cudaEventQuery(exchange.before.get()) == cudaSuccess)) exchange.begun = now;
  if (exchange.begun && now - *exchange.begun > timeout_) why = kNotInTime;
  return false;
}

}  // namespace heddle::distributed
