#include <cmath>

#include "kit/device_mirror.h"
#include "soak/elements.cuh"
#include "soak/reference.h"

namespace heddle::soak {
namespace {

constexpr int kBlocks = 1024, kThreads = 128;

// Numbers on the GPU.
struct Doubles {
  kit::DeviceMemory memory;
  explicit Doubles(std::int64_t count) : memory(sizeof(double) * static_cast<std::size_t>(count)) {}
  operator double*() const { return static_cast<double*>(memory.data()); }
};

__device__ double sigmoid(double z) { return 1 / (1 + exp(-z)); }
__device__ double silu(double z) { return z * sigmoid(z); }
__device__ double silu_slope(double z) { return sigmoid(z) * (1 + z * (1 - sigmoid(z))); }

// A thread for each row.
__global__ void inputs_kernel(const Linear l, double* x) {
  for_each(l.rows, [&](std::int64_t m) {
    double squares = 0;
    for (std::int64_t i = 0; i < l.k; ++i) {
      x[m * l.k + i] = load(l.x, l.dtype, m * l.k + i);
      squares += x[m * l.k + i] * x[m * l.k + i];
    }
    if (l.norm_weight == nullptr) return;
    const double factor = 1 / sqrt(squares / static_cast<double>(l.k) + 1e-5);
    for (std::int64_t i = 0; i < l.k; ++i) x[m * l.k + i] *= factor * load(l.norm_weight, l.dtype, i);
  });
}

// z [rows, n]: a block for some columns of a row.
__global__ void sums_kernel(const Linear l, const double* x, double* z) {
  const std::int64_t column = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x, m = blockIdx.y;
  if (column >= l.n) return;
  double sum = l.bias != nullptr ? load(l.bias, l.dtype, column) : 0;
  for (std::int64_t i = 0; i < l.k; ++i) sum += x[m * l.k + i] * static_cast<double>(l.w[column * l.k + i]);
  z[m * l.n + column] = sum;
}

__global__ void outputs_kernel(const Linear l, const double* z, double* y) {
  for_each(l.rows * l.outputs(), [&](std::int64_t at) {
    y[at] = l.activation == Activation::swiglu ? silu(z[2 * at]) * z[2 * at + 1]
            : l.activation == Activation::silu ? silu(z[at])
                                               : z[at];
  });
}

// dz takes z's place.
__global__ void slopes_kernel(const Linear l, const void* dy, double* z) {
  for_each(l.rows * l.outputs(), [&](std::int64_t at) {
    const double d = load(dy, l.dtype, at);
    if (l.activation == Activation::swiglu) {
      const double gate = z[2 * at], up = z[2 * at + 1];
      z[2 * at] = d * up * silu_slope(gate);
      z[2 * at + 1] = d * silu(gate);
    } else {
      z[at] = l.activation == Activation::silu ? d * silu_slope(z[at]) : d;
    }
  });
}

// A block for some columns of a row.
__global__ void dx_kernel(const Linear l, const double* dz, double* dx) {
  const std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x, m = blockIdx.y;
  if (i >= l.k) return;
  double sum = 0;
  for (std::int64_t n = 0; n < l.n; ++n) sum += dz[m * l.n + n] * static_cast<double>(l.w[n * l.k + i]);
  dx[m * l.k + i] = sum;
}

__global__ void dbias_kernel(const Linear l, const double* dz, double* dbias) {
  for_each(l.n, [&](std::int64_t n) {
    dbias[n] = 0;
    for (std::int64_t m = 0; m < l.rows; ++m) dbias[n] += dz[m * l.n + n];
  });
}

dim3 grid_of(std::int64_t columns, std::int64_t rows) {
  return dim3(static_cast<unsigned>((columns + kThreads - 1) / kThreads), static_cast<unsigned>(rows));
}

void compute_sums(const Linear& l, double* z) {
  const Doubles x(l.rows * l.k);
  inputs_kernel<<<kBlocks, kThreads>>>(l, x);
  sums_kernel<<<grid_of(l.n, l.rows), kThreads>>>(l, x, z);
  check(cudaDeviceSynchronize());
}

}  // namespace

void reference_linear(const Linear& l, double* y) {
  const Doubles z(l.rows * l.n);
  compute_sums(l, z);
  outputs_kernel<<<kBlocks, kThreads>>>(l, z, y);
  check(cudaDeviceSynchronize());
}

void reference_linear_gradients(const Linear& l, const void* dy, double* dx, double* dbias) {
  const Doubles z(l.rows * l.n);
  if (l.activation != Activation::none) compute_sums(l, z);
  slopes_kernel<<<kBlocks, kThreads>>>(l, dy, z);
  dx_kernel<<<grid_of(l.k, l.rows), kThreads>>>(l, z, dx);
  dbias_kernel<<<kBlocks, kThreads>>>(l, z, dbias);
  check(cudaDeviceSynchronize());
}

}  // namespace heddle::soak
