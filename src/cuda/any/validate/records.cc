#include "cuda/any/validate/records.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <new>
#include <span>
#include <utility>

#include "core/check.h"
#include "cuda/common/device.h"
#include "cuda/validate.h"

namespace heddle::cuda {
namespace {

static_assert(sizeof(IndexRecord) == 128, "heddle/runtime.h says how much memory records take");

// A stream that is destroyed leaves its record to the next one at its address; graphs that were captured keep writing
// there.
class Records {
 public:
  static Records& get() {
    static Records records;
    return records;
  }

  StreamRecord of(std::string_view operation, void* stream) {
    const std::lock_guard lock(mutex_);
    if (memory_ == nullptr) allocate(operation);
    const std::pair key(current_device().ordinal, stream);
    const auto known = used();
    const auto at = std::find(known.begin(), known.end(), key);
    const auto number = static_cast<int>(at - known.begin());
    if (at == known.end()) {
      if (count_ == kMostStreams) {
        throw RuntimeError(text("[", operation, "] validate: ", kMostStreams,
                                " streams have been used, and no more can have records: use some of them again"));
      }
      keys_[static_cast<std::size_t>(count_++)] = key;
    }
    return {memory_ + number, number};
  }

  std::string take_of(void* stream) {
    const std::lock_guard lock(mutex_);
    const std::pair key(current_device().ordinal, stream);
    for (int n = 0; n < count_; ++n) {
      if (keys_[static_cast<std::size_t>(n)] == key) return take(memory_[n]);
    }
    return "";
  }

  std::string take_all(int gpu) {
    const std::lock_guard lock(mutex_);
    std::string out;
    for (int n = 0; n < count_; ++n) {
      if (keys_[static_cast<std::size_t>(n)].first != gpu) continue;
      const std::string found = take(memory_[n]);
      if (!found.empty()) out += (out.empty() ? "" : "\n") + found;
    }
    return out;
  }

 private:
  using Key = std::pair<int, void*>;  // GPU and stream

  std::span<const Key> used() const { return {keys_.data(), static_cast<std::size_t>(count_)}; }

  // Never freed: kernels in flight, and graphs, know the address.
  void allocate(std::string_view operation) {
    // A thread that captures a stream may not allocate otherwise. Nothing of this goes to a stream.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check(cudaThreadExchangeStreamCaptureMode(&mode), operation);
    void* memory = nullptr;
    const cudaError_t status =
        cudaHostAlloc(&memory, kMostStreams * sizeof(IndexRecord), cudaHostAllocPortable | cudaHostAllocMapped);
    check(cudaThreadExchangeStreamCaptureMode(&mode), operation);
    check(status, operation);
    auto* records = static_cast<IndexRecord*>(memory);
    for (int n = 0; n < kMostStreams; ++n) new (records + n) IndexRecord;
    memory_ = records;
  }

  std::mutex mutex_;
  IndexRecord* memory_ = nullptr;
  std::array<Key, kMostStreams> keys_{};
  int count_ = 0;
};

}  // namespace

StreamRecord record_of(std::string_view operation, void* stream) { return Records::get().of(operation, stream); }

std::string take_bad_index(void* stream) { return Records::get().take_of(stream); }

std::string take_bad_indices(int gpu) { return Records::get().take_all(gpu); }

void wait_for(void* stream) { check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "last_error"); }

}  // namespace heddle::cuda
