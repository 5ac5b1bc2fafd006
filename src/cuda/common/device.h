// What the host asks of the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <string_view>

namespace heddle::cuda {

// Shared memory that a block may have.
constexpr std::size_t kAmpereSharedBytes = 99 * 1024;  // sm_86 and sm_89, the least of those that run code for sm_80
constexpr std::size_t kHopperSharedBytes = 227 * 1024;

inline constexpr const char* kNoGpu = "there is no usable NVIDIA GPU or driver";

struct DeviceProperties {
  int ordinal = -1;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int shared_memory = 0;  // bytes that one block may have
  int multiprocessor_shared_memory = 0;
  int l2_bytes = 0;
  std::string name;
};

// Of the current device, asked once for each. major is 0 if there is no usable GPU; nothing is thrown then.
const DeviceProperties& current_device();

// What starting a kernel on the current device has to know of it.
struct KernelFacts {
  // Whether its code can wait for the grid before it: code of compute_90 and later. That of an older architecture has
  // no such instruction (overlap.cuh), and a newer GPU runs it all the same.
  bool waits_for_previous_grid = false;
  int most_dynamic_memory = 0;  // bytes of shared memory that a block may have beside its static ones
};

// Asked once by each thread, for each device.
const KernelFacts& facts_of(const void* kernel);

// Throws RuntimeError "[what] CUDA: ..." unless `status` is success.
void check(cudaError_t status, std::string_view what);

}  // namespace heddle::cuda
