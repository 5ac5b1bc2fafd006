// Memory of the GPU that an encoder's weights stay in.
#include "cuda/common/device.h"
#include "cuda/encoder.h"
#include "heddle/error.h"

namespace heddle::cuda {

int current_gpu() {
  const int gpu = current_device().ordinal;
  if (gpu < 0) throw RuntimeError("[encoder] device is cuda: this process sees no GPU");
  return gpu;
}

std::byte* copied_to_gpu(const void* from, std::size_t bytes) {
  void* data = nullptr;
  check(cudaMalloc(&data, bytes), "encoder");
  const cudaError_t copied = cudaMemcpy(data, from, bytes, cudaMemcpyHostToDevice);
  if (copied != cudaSuccess) cudaFree(data);
  check(copied, "encoder");
  return static_cast<std::byte*>(data);
}

void free_on_gpu(std::byte* data) noexcept { cudaFree(data); }

void copy_to_gpu(void* to, const void* from, std::size_t bytes, void* stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)), "encode");
}

}  // namespace heddle::cuda
