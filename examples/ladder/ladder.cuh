// What the rungs share: the problem, its timing and its check.
//
// Exact attention forward, q, k, v, o in bfloat16 as [B, S, H, D], D = 128, S a multiple of 128, scale 1 / sqrt(D),
// with or without a causal mask. Each program takes: S (4096), causal (0), B (16384 / S), H (16).
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace ladder {

using bf16 = __nv_bfloat16;
constexpr int kHeads = 16, kSize = 128;                                    // H, D
constexpr std::int64_t kStride = kHeads * kSize;                           // from one row of a head to the next
constexpr float kScaleLog2 = 0.08838834764831845f * 1.44269504088896341f;  // log2(e) / sqrt(D)

struct Problem {
  int length = 4096, causal = 0, batch = 4;  // S, a mask or not, B
  bf16 *q = nullptr, *k = nullptr, *v = nullptr, *o = nullptr;

  // Elements before a head's first row.
  __host__ __device__ std::int64_t head(int b, int h) const { return b * length * kStride + h * kSize; }
  // Keys that row i attends: the first so many.
  __host__ __device__ int keys(int i) const { return causal ? i + 1 : length; }
  std::int64_t elements() const { return batch * length * kStride; }
  double flops() const { return 4.0 * batch * kHeads * kSize * length * length / (causal ? 2 : 1); }
};

inline void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(status));
  std::exit(status == cudaErrorNoKernelImageForDevice ? 3 : 2);  // 3: not a rung for this GPU
}

// Starts `kernel` with as much shared memory as it asks for.
template <class... Parameters, class... Arguments>
void start(void (*kernel)(Parameters...), dim3 grid, int threads, int bytes, Arguments... arguments) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<grid, threads, bytes>>>(arguments...);
  check(cudaGetLastError());
}

// What main() of a rung does: fills q, k and v, times `launch`, prints a line, and returns 0 if the result is right.
int run(const char* name, int argc, char** argv, void (*launch)(const Problem&));

}  // namespace ladder
