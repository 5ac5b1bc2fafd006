#include "soak/device.h"

#include <algorithm>
#include <cmath>

#include "soak/elements.cuh"

namespace heddle::soak {
namespace {

__device__ std::uint64_t mixed(std::uint64_t x) {  // SplitMix64
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

__global__ void fill_kernel(void* data, DType dtype, std::int64_t count, std::uint64_t seed, float deviation) {
  for_each(count, [&](std::int64_t n) {
    const std::uint64_t bits = mixed(seed * 0x100000001B3ull + static_cast<std::uint64_t>(n));
    const float u = (static_cast<float>(bits >> 40) + 1.0f) * 0x1p-24f,
                turn = static_cast<float>(bits & 0xFFFFFF) * 0x1p-24f;
    store(data, dtype, n, static_cast<double>(deviation * sqrtf(-2.0f * logf(u)) * cospif(2.0f * turn)));
  });
}

// One warp a row.
__global__ void other_rows_kernel(const std::uint32_t* x, const std::uint32_t* y, std::int64_t rows, std::int64_t words,
                                  Tally* tally) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (std::int64_t row = (blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x) / 32; row < rows;
       row += std::int64_t{gridDim.x} * blockDim.x / 32) {
    bool other = false;
    for (std::int64_t n = lane; n < words; n += 32) other |= x[row * words + n] != y[row * words + n];
    if (!__any_sync(0xffffffff, other) || lane != 0) continue;
    atomicAdd(&tally->rows, 1ull);
    atomicMin(&tally->first, static_cast<unsigned long long>(row));
  }
}

__global__ void far_rows_kernel(const void* x, DType dtype, const double* expected, std::int64_t rows,
                                std::int64_t width, double tolerance, double average, Tally* tally) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (std::int64_t row = (blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x) / 32; row < rows;
       row += std::int64_t{gridDim.x} * blockDim.x / 32) {
    double error = 0, size = 0;
    for (std::int64_t n = lane; n < width; n += 32) {
      const double found = load(x, dtype, row * width + n), wanted = expected[row * width + n];
      if (isinf(wanted)) {
        if (!(found == wanted)) error = INFINITY;
        continue;
      }
      error += (found - wanted) * (found - wanted);
      size += wanted * wanted;
    }
    for (int step = 16; step > 0; step /= 2) {
      error += __shfl_xor_sync(0xffffffff, error, step);
      size += __shfl_xor_sync(0xffffffff, size, step);
    }
    const double allowed = tolerance * tolerance * (size + average * average * static_cast<double>(width));
    if (lane != 0 || error <= allowed) continue;
    atomicAdd(&tally->rows, 1ull);
    atomicMin(&tally->first, static_cast<unsigned long long>(row));
    // Positive floats are in the order of their bits; NaN is above all.
    atomicMax(reinterpret_cast<unsigned*>(&tally->worst),
              __float_as_uint(static_cast<float>(sqrt(error / allowed))) & 0x7FFFFFFFu);
  }
}

__global__ void squares_kernel(const double* x, std::int64_t count, double* sums) {
  double sum = 0, finite = 0;
  for (std::int64_t n = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; n < count;
       n += std::int64_t{gridDim.x} * blockDim.x) {
    if (isinf(x[n])) continue;
    sum += x[n] * x[n];
    finite += 1;
  }
  atomicAdd(sums, sum);
  atomicAdd(sums + 1, finite);
}

}  // namespace

void fill_normal(void* data, DType dtype, std::int64_t count, std::uint64_t seed, float deviation) {
  fill_kernel<<<1024, 256>>>(data, dtype, count, seed, deviation);
  check(cudaGetLastError());
}

void count_other_rows(const void* x, const void* y, std::int64_t rows, std::int64_t row_bytes, Tally* tally,
                      void* stream) {
  other_rows_kernel<<<512, 256, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const std::uint32_t*>(x), static_cast<const std::uint32_t*>(y), rows, row_bytes / 4, tally);
  check(cudaGetLastError());
}

void count_far_rows(const void* x, DType dtype, const double* expected, std::int64_t rows, std::int64_t width,
                    double tolerance, double average, Tally* tally, void* stream) {
  far_rows_kernel<<<512, 256, 0, static_cast<cudaStream_t>(stream)>>>(x, dtype, expected, rows, width, tolerance,
                                                                      average, tally);
  check(cudaGetLastError());
}

double root_mean_square(const double* x, std::int64_t count) {
  double* sums = nullptr;
  double host[2];
  check(cudaMalloc(&sums, sizeof(host)));
  check(cudaMemset(sums, 0, sizeof(host)));
  squares_kernel<<<512, 256>>>(x, count, sums);
  check(cudaMemcpy(host, sums, sizeof(host), cudaMemcpyDeviceToHost));
  check(cudaFree(sums));
  return std::sqrt(host[0] / std::max(host[1], 1.0));
}

void fill_bytes(void* to, int value, std::size_t bytes, void* stream) {
  check(cudaMemsetAsync(to, value, bytes, static_cast<cudaStream_t>(stream)));
}

void copy_bytes(void* to, const void* from, std::size_t bytes, void* stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)));
}

void finish() { check(cudaDeviceSynchronize()); }

}  // namespace heddle::soak
