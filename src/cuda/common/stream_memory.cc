#include "cuda/stream_memory.h"

#include "core/check.h"
#include "cuda/common/device.h"
#include "heddle/error.h"

namespace heddle::cuda {

int exchange_current_gpu(int gpu) {
  int before = -1, count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    cudaGetLastError();  // not left for the next call to trip over
    throw RuntimeError(text("[heddle] ", kNoGpu));
  }
  check(cudaGetDevice(&before), "cudaGetDevice");
  if (gpu != before) check(cudaSetDevice(gpu), "cudaSetDevice");
  return before;
}

void* take_memory(std::size_t bytes, void* stream) {
  void* memory = nullptr;
  check(cudaMallocAsync(&memory, bytes, static_cast<cudaStream_t>(stream)), "workspace");
  return memory;
}

void give_memory_back(void* memory, void* stream) noexcept { cudaFreeAsync(memory, static_cast<cudaStream_t>(stream)); }

}  // namespace heddle::cuda
