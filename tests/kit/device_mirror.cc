#include "kit/device_mirror.h"

#include <cuda_runtime_api.h>

#include "core/check.h"
#include "heddle/error.h"

namespace heddle::kit {
namespace {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // not left for the next call to trip over
  throw RuntimeError(text(what, ": ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ")"));
}

cudaStream_t stream_of(const DeviceStream& stream) { return static_cast<cudaStream_t>(stream.get()); }

}  // namespace

Gpu current_gpu() {
  Gpu gpu;
  int ordinal = 0;
  cudaDeviceProp properties{};
  cudaError_t status = cudaGetDevice(&ordinal);
  if (status == cudaSuccess) status = cudaGetDeviceProperties(&properties, ordinal);
  if (status != cudaSuccess) {
    cudaGetLastError();
    gpu.absence = text("there is no usable NVIDIA GPU or driver: ", cudaGetErrorString(status));
    return gpu;
  }
  gpu.name = properties.name;
  gpu.major = properties.major;
  gpu.minor = properties.minor;
  gpu.memory = properties.totalGlobalMem;
  return gpu;
}

void DeviceMemory::Free::operator()(void* data) const { cudaFree(data); }

DeviceMemory::DeviceMemory(std::size_t bytes) : bytes_(bytes) {
  void* data = nullptr;
  if (bytes > 0) check(cudaMalloc(&data, bytes), "memory of the GPU");
  data_.reset(data);
}

DeviceMemory::DeviceMemory(std::size_t bytes, int fill) : DeviceMemory(bytes) {
  if (bytes > 0) check(cudaMemset(data(), fill, bytes), "filling memory of the GPU");
  // The streams of the tests do not wait for this one.
  if (bytes > 0) check(cudaStreamSynchronize(nullptr), "filling memory of the GPU");
}

void DeviceMemory::write(std::size_t offset, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  check(cudaMemcpy(static_cast<std::byte*>(data()) + offset, from, bytes, cudaMemcpyHostToDevice), "copy to the GPU");
  // From pageable memory the call may return before the last piece is there.
  check(cudaStreamSynchronize(nullptr), "copy to the GPU");
}

void DeviceMemory::read(std::size_t offset, void* to, std::size_t bytes) const {
  if (bytes == 0) return;
  check(cudaMemcpy(to, static_cast<const std::byte*>(data()) + offset, bytes, cudaMemcpyDeviceToHost),
        "copy from the GPU");
}

DeviceTensor::DeviceTensor(const HostTensor& host) {
  if (!host.given()) return;
  memory_ = DeviceMemory(host.memory().size());
  view_ = host.view();
  view_.device = Device::cuda;
  view_.data = static_cast<std::byte*>(memory_.data()) +
               (static_cast<const std::byte*>(host.view().data) - host.memory().data());
  write(host);
}

void DeviceTensor::write(const HostTensor& host) { memory_.write(0, host.memory().data(), memory_.bytes()); }

void DeviceTensor::read(HostTensor& host) const { memory_.read(0, host.memory().data(), memory_.bytes()); }

void DeviceStream::Destroy::operator()(void* stream) const { cudaStreamDestroy(static_cast<cudaStream_t>(stream)); }

DeviceStream::DeviceStream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream of the GPU");
  stream_.reset(stream);
}

void DeviceStream::synchronize() const { check(cudaStreamSynchronize(stream_of(*this)), "work on the GPU"); }

void DeviceGraph::Destroy::operator()(void* graph) const { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); }

DeviceGraph::DeviceGraph(const DeviceStream& stream, const std::function<void()>& launch) {
  check(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal), "capture");
  cudaGraph_t graph = nullptr;
  try {
    launch();
  } catch (...) {
    cudaStreamEndCapture(stream_of(stream), &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  check(cudaStreamEndCapture(stream_of(stream), &graph), "capture");
  cudaGraphExec_t executable = nullptr;
  check(cudaGraphGetNodes(graph, nullptr, &nodes_), "nodes of a graph");
  const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  check(status, "instantiation of a graph");
  executable_.reset(executable);
}

void DeviceGraph::replay(const DeviceStream& stream) const {
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable_.get()), stream_of(stream)), "launch of a graph");
}

}  // namespace heddle::kit
