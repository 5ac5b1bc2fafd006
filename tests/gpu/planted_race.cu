// For scripts/test_gpu.sh: a race in shared memory that a checker must see, and what racecheck takes for one.
#include <cuda_runtime_api.h>

#include "gpu/planted_race.h"

namespace heddle::kit {
namespace {

__global__ void neighbours(int* out) {
  __shared__ int values[256];
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  // A barrier is missing here: the neighbour may be in another warp.
  out[threadIdx.x] = values[(threadIdx.x + 128) % 256];
}

template <int kBarrier, int kThreads>
__device__ void meet() {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// Two warpgroups. All 256 threads meet at barrier 1 between the stores and the loads, and between the loads and the
// next stores. Before that the first warpgroup meets once at a barrier of its own, the second one twice.
__global__ void meet_unevenly(int* out) {
  __shared__ int values[256];
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  int sum = 0;
#pragma unroll 1
  for (int turn = 0; turn < 20; ++turn) {
#pragma unroll 1
    for (int n = 0; n <= warpgroup; ++n) warpgroup == 0 ? meet<2, 128>() : meet<3, 128>();
    values[threadIdx.x] = turn + sum;
    meet<1, 256>();
    sum += values[(threadIdx.x + 128) % 256];
    meet<1, 256>();
  }
  out[threadIdx.x] = sum;
}

}  // namespace

bool run_met_unevenly(int* out, void* stream) {
  meet_unevenly<<<1, 256, 0, static_cast<cudaStream_t>(stream)>>>(out);
  return cudaGetLastError() == cudaSuccess;
}

bool run_planted_race(int* out, void* stream) {
  neighbours<<<1, 256, 0, static_cast<cudaStream_t>(stream)>>>(out);
  return cudaGetLastError() == cudaSuccess;
}

}  // namespace heddle::kit
