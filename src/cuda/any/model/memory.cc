// Memory of the GPU that a model's weights stay in.
#include "core/check.h"
#include "cuda/common/device.h"
#include "cuda/model.h"
#include "heddle/error.h"

namespace heddle::cuda {

int current_gpu(std::string_view operation) {
  const int gpu = current_device().ordinal;
  if (gpu < 0) throw RuntimeError(text("[", operation, "] device is cuda: this process sees no GPU"));
  return gpu;
}

std::byte* copied_to_gpu(const void* from, std::size_t bytes) {
  void* data = nullptr;
  check(cudaMalloc(&data, bytes), "model_weights");
  const cudaError_t copied = cudaMemcpy(data, from, bytes, cudaMemcpyHostToDevice);
  if (copied != cudaSuccess) cudaFree(data);
  check(copied, "model_weights");
  return static_cast<std::byte*>(data);
}

void free_on_gpu(std::byte* data) noexcept { cudaFree(data); }

void copy_to_gpu(void* to, const void* from, std::size_t bytes, void* stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)), "encode");
}

}  // namespace heddle::cuda
