#include "cuda/common/device.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "core/check.h"
#include "cuda/assumed_gpu.h"
#include "cuda/backend.h"
#include "heddle/explain.h"

namespace heddle::cuda {
namespace {

constexpr int kMaxDevices = 64;

// What this thread takes for the current device.
constinit thread_local const DeviceProperties* assumed = nullptr;

DeviceProperties read(int ordinal) {
  DeviceProperties device;
  device.ordinal = ordinal;
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, ordinal), "device properties");
  device.name = properties.name;
  const auto get = [&](cudaDeviceAttr attribute) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, attribute, ordinal), "device attributes");
    return value;
  };
  device.major = get(cudaDevAttrComputeCapabilityMajor);
  device.minor = get(cudaDevAttrComputeCapabilityMinor);
  device.multiprocessors = get(cudaDevAttrMultiProcessorCount);
  device.shared_memory = get(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  device.multiprocessor_shared_memory = get(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  device.l2_bytes = get(cudaDevAttrL2CacheSize);
  return device;
}

}  // namespace

bool built() { return true; }

Gpus gpus() {
  Gpus found;
  found.runtime = CUDART_VERSION;
  if (cudaDriverGetVersion(&found.driver) != cudaSuccess) found.driver = 0;
  int count = 0, current = 0;
  cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess) status = cudaGetDevice(&current);
  for (int ordinal = 0; status == cudaSuccess && ordinal < count; ++ordinal) {
    cudaDeviceProp p{};
    status = cudaGetDeviceProperties(&p, ordinal);
    if (status == cudaSuccess) {
      found.list.push_back({p.name, p.major, p.minor, p.multiProcessorCount, p.totalGlobalMem});
    }
  }
  if (status != cudaSuccess) {
    cudaGetLastError();  // not left for the next call to trip over
    found.list.clear();
    found.absence = text(kNoGpu, ": ", cudaGetErrorString(status));
  }
  found.current = static_cast<std::size_t>(current);
  return found;
}

AssumedGpu::AssumedGpu(const GpuModel& model)
    : device_(new DeviceProperties{.major = model.major,
                                   .minor = model.minor,
                                   .multiprocessors = model.multiprocessors,
                                   .shared_memory = model.shared_memory,
                                   .multiprocessor_shared_memory = model.multiprocessor_shared_memory,
                                   .l2_bytes = model.l2_bytes,
                                   .name = std::string(model.product)}),
      before_(std::exchange(assumed, device_.get())) {}

AssumedGpu::~AssumedGpu() { assumed = before_; }

bool gpu_is_assumed() { return assumed != nullptr; }

void require_gpu_that_is_here(std::string_view operation) {
  if (assumed == nullptr) return;
  throw RuntimeError(text("[", operation, "] nothing runs on a GPU that is only assumed: ", assumed->name));
}

int clusters_held(int (*ask)(int size), int size) {
  if (assumed == nullptr) return ask(size);
  // A cluster lies in one of at most 8 groups, which have pairs of multiprocessors: each leaves less than a cluster.
  constexpr int kGroups = 8;
  const int unused = kGroups * (size % 2 == 0 ? size - 2 : size - 1);
  return std::max(assumed->multiprocessors - unused, 0) / size;
}

const DeviceProperties& current_device() {
  if (assumed != nullptr) return *assumed;
  static const DeviceProperties none;
  int ordinal = 0;
  if (cudaGetDevice(&ordinal) != cudaSuccess || ordinal >= kMaxDevices) {
    cudaGetLastError();  // no driver, or no GPU: an answer, not an error to leave behind
    return none;
  }
  static std::array<DeviceProperties, kMaxDevices> devices;
  static std::array<std::once_flag, kMaxDevices> once;
  std::call_once(once[ordinal], [&] { devices[ordinal] = read(ordinal); });
  return devices[ordinal];
}

const KernelFacts& facts_of(const void* kernel) {
  constexpr int kFirst = 90;
  require_gpu_that_is_here("kernel");
  thread_local std::map<std::pair<int, const void*>, KernelFacts> known;
  const DeviceProperties& device = current_device();
  const std::pair key(device.ordinal, kernel);
  if (const auto at = known.find(key); at != known.end()) return at->second;
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), "function attributes");
  return known[key] = {.waits_for_previous_grid = attributes.ptxVersion >= kFirst,
                       .most_dynamic_memory = device.shared_memory - static_cast<int>(attributes.sharedSizeBytes)};
}

void check(cudaError_t status, std::string_view what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // not left for the next call to trip over
  throw RuntimeError(text("[", what, "] CUDA: ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ")"));
}

}  // namespace heddle::cuda
