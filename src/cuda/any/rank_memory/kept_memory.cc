// Memory that a rank keeps: taken and given back on a stream of its own, so that it outlives the caller's streams.
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "core/check.h"
#include "cuda/common/device.h"
#include "cuda/rank_memory.h"
#include "heddle/error.h"

namespace heddle::cuda {
namespace {

constexpr const char* kWhat = "distributed memory";

// The devices of this process that reach memory of `gpu`. NCCL lets ranks of one process write to each other's, which
// for memory that is taken in a stream's order must be said.
std::vector<cudaMemAccessDesc> peers_of(int gpu) {
  int count = 0;
  check(cudaGetDeviceCount(&count), kWhat);
  std::vector<cudaMemAccessDesc> out;
  for (int peer = 0; peer < count; ++peer) {
    int reaches = 0;
    if (peer != gpu) check(cudaDeviceCanAccessPeer(&reaches, peer, gpu), kWhat);
    if (reaches == 0) continue;
    cudaMemAccessDesc access = {};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = peer;
    access.flags = cudaMemAccessFlagsProtReadWrite;
    out.push_back(access);
  }
  return out;
}

bool captured(cudaStream_t stream) { return capture_id(stream) != 0; }

}  // namespace

std::uint64_t capture_id(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  check(cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id), kWhat);
  return status == cudaStreamCaptureStatusNone ? 0 : id;
}

struct KeptMemory::State {
  State() {
    int gpu = 0;
    check(cudaGetDevice(&gpu), kWhat);
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = gpu;
    check(cudaMemPoolCreate(&pool, &properties), kWhat);
    // Memory goes back to the system with the pool: to unmap it earlier may wait for the GPU.
    std::uint64_t all = std::numeric_limits<std::uint64_t>::max();
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all), kWhat);
    const std::vector<cudaMemAccessDesc> peers = peers_of(gpu);
    if (!peers.empty()) check(cudaMemPoolSetAccess(pool, peers.data(), peers.size()), kWhat);
    check(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking), kWhat);
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), kWhat);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  // Both are destroyed once what is on the stream is done, and the pool once its memory was given back.
  ~State() {
    for (void* const data : of_graphs) cudaFreeAsync(data, own);
    if (event != nullptr) cudaEventDestroy(event);
    if (own != nullptr) cudaStreamDestroy(own);
    if (pool != nullptr) cudaMemPoolDestroy(pool);
  }
  // What is put on `then` from now on waits for what is on `first`.
  cudaError_t order(cudaStream_t first, cudaStream_t then) {
    const cudaError_t status = cudaEventRecord(event, first);
    return status != cudaSuccess ? status : cudaStreamWaitEvent(then, event, 0);
  }

  cudaMemPool_t pool = nullptr;
  cudaStream_t own = nullptr;
  cudaEvent_t event = nullptr;
  bool has_graphs = false;       // calls were captured, and their memory stays
  std::vector<void*> of_graphs;  // such memory that is no longer anybody's
};

void refuse_capture(std::size_t bytes, void* stream) {
  if (!captured(static_cast<cudaStream_t>(stream))) return;
  throw RuntimeError(text("[distributed] ", bytes,
                          " bytes more are needed while the stream is captured, which takes no memory: make such a "
                          "call once before the capture"));
}

KeptMemory::KeptMemory() : state_(std::make_unique<State>()) {}

KeptMemory::~KeptMemory() = default;

void* KeptMemory::replace(void* old, std::size_t bytes, void* stream) {
  const auto of_caller = static_cast<cudaStream_t>(stream);
  State& s = *state_;
  if (old != nullptr && (s.has_graphs || captured(of_caller))) s.of_graphs.push_back(std::exchange(old, nullptr));
  refuse_capture(bytes, stream);
  check(s.order(of_caller, s.own), kWhat);
  if (old != nullptr) check(cudaFreeAsync(old, s.own), kWhat);
  void* data = nullptr;
  check(cudaMallocFromPoolAsync(&data, bytes, s.pool, s.own), text("distributed: ", bytes, " bytes of memory"));
  check(s.order(s.own, of_caller), kWhat);
  return data;
}

void KeptMemory::give_back(void* data) noexcept { cudaFreeAsync(data, state_->own); }

void KeptMemory::end_of_call(void* stream) noexcept {
  const auto of_caller = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(of_caller, &status) != cudaSuccess) return;
  if (status != cudaStreamCaptureStatusNone) {
    state_->has_graphs = true;
    return;
  }
  state_->order(of_caller, state_->own);  // where it fails, so does the caller's next call
}

void write_to_gpu(void* to, const void* from, std::size_t bytes, void* stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)), kWhat);
}

void read_from_gpu(void* to, const void* from, std::size_t bytes, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, on), kWhat);
  check(cudaStreamSynchronize(on), kWhat);
}

void copy_rows_on_gpu(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                      std::size_t rows, void* stream) {
  check(cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, rows, cudaMemcpyDeviceToDevice,
                          static_cast<cudaStream_t>(stream)),
        kWhat);
}
void copy_on_gpu(void* to, const void* from, std::size_t bytes, void* stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)), kWhat);
}

}  // namespace heddle::cuda
