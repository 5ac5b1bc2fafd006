// A GPU that need not be here, so that candidates can be asked what they would do on it.
#pragma once

#include <memory>
#include <string_view>

#include "heddle/explain.h"

namespace heddle::cuda {

struct DeviceProperties;

// While it lives, current_device() of its thread is such a GPU; other threads see what there is. It has no number, and
// nothing can be started on it: require_gpu_that_is_here() stands before every launch.
class AssumedGpu {
 public:
  explicit AssumedGpu(const GpuModel& model);
  ~AssumedGpu();
  AssumedGpu(const AssumedGpu&) = delete;
  AssumedGpu& operator=(const AssumedGpu&) = delete;

 private:
  std::unique_ptr<const DeviceProperties> device_;
  const DeviceProperties* before_ = nullptr;
};

// Whether this thread has one.
bool gpu_is_assumed();

// Throws RuntimeError "[operation] ..." if this thread has one.
void require_gpu_that_is_here(std::string_view operation);

// How many clusters of `size` CTAs, each with a multiprocessor of its own, the current GPU holds at once; ask: a
// kernel's question to the driver. Of a GPU that is assumed, the least that there can be.
int clusters_held(int (*ask)(int size), int size);

}  // namespace heddle::cuda
