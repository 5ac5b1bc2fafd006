// For scripts/test_gpu.sh: a race in shared memory that a checker must see.
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

}  // namespace

bool run_planted_race(int* out, void* stream) {
  neighbours<<<1, 256, 0, static_cast<cudaStream_t>(stream)>>>(out);
  return cudaGetLastError() == cudaSuccess;
}

}  // namespace heddle::kit
