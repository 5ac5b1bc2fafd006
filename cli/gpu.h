// The current GPU as `run`, `bench` and `tune` use it: tensors in its memory, and the time of calls. Over the tests'
// kit; kit_absent.cc stands in for it in a build without.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "heddle/runtime.h"
#include "heddle/tensor.h"

namespace heddle::cli {

class Gpu {
 public:
  // Throws RuntimeError, "[verb] ...", where there is none, as all that follows does where the GPU says no.
  explicit Gpu(const char* verb);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // Contiguous tensors that live as long as this: of the host's values, or not initialised.
  TensorView copy(const TensorView& host);
  TensorView allocate(const TensorView& like);
  // Waits for the stream, and reads a tensor into as much memory of the host.
  void read(const TensorView& from, void* to) const;

  // With this stream, and memory of that many bytes until the next call.
  Runtime runtime(std::size_t workspace);
  // Of one call, to its end.
  double seconds(const std::function<void()>& launch) const;

 private:
  friend class GpuTimer;
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// Times one call by replaying graphs of so many of it that a round takes milliseconds, so that launches cost nothing.
class GpuTimer {
 public:
  // Runs `launch` once before anything is timed.
  GpuTimer(const Gpu& gpu, const std::function<void()>& launch);
  ~GpuTimer();
  // Seconds of a call in one round.
  double round() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace heddle::cli
