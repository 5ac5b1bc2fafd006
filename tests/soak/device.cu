#include "soak/device.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace heddle::soak {
namespace {

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status));
}

__device__ double load(const void* data, DType dtype, std::int64_t at) {
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(data)[at];
    case DType::f16:
      return static_cast<double>(__half2float(static_cast<const __half*>(data)[at]));
    case DType::bf16:
      return static_cast<double>(__bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]));
    default:
      return static_cast<double>(static_cast<float>(static_cast<const __nv_fp8_e4m3*>(data)[at]));
  }
}

__device__ std::uint64_t mixed(std::uint64_t x) {  // SplitMix64
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

__global__ void fill_kernel(void* data, DType dtype, std::int64_t count, std::uint64_t seed, float deviation) {
  for (std::int64_t n = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; n < count;
       n += std::int64_t{gridDim.x} * blockDim.x) {
    const std::uint64_t bits = mixed(seed * 0x100000001B3ull + static_cast<std::uint64_t>(n));
    const float u = (static_cast<float>(bits >> 40) + 1.0f) * 0x1p-24f,
                turn = static_cast<float>(bits & 0xFFFFFF) * 0x1p-24f;
    const float x = deviation * sqrtf(-2.0f * logf(u)) * cospif(2.0f * turn);
    switch (dtype) {
      case DType::f32:
        static_cast<float*>(data)[n] = x;
        break;
      case DType::f16:
        static_cast<__half*>(data)[n] = __float2half(x);
        break;
      case DType::bf16:
        static_cast<__nv_bfloat16*>(data)[n] = __float2bfloat16(x);
        break;
      default:
        static_cast<__nv_fp8_e4m3*>(data)[n] = __nv_fp8_e4m3(x);
    }
  }
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

// ---- attention

// One sequence as a row of q sees it.
struct Sequence {
  int b, i;                   // the row's sequence and position
  std::int64_t q_row, k_row;  // of the row, and of the sequence's first key
  int rows, keys, off;
};

__device__ Sequence sequence_of(const Attention& a, std::int64_t row) {
  Sequence s{};
  if (a.cu_q != nullptr) {
    while (a.cu_q[s.b + 1] <= row) ++s.b;
    s.i = static_cast<int>(row - a.cu_q[s.b]);
    s.rows = a.cu_q[s.b + 1] - a.cu_q[s.b];
    s.k_row = a.cu_k[s.b];
    s.keys = a.cu_k[s.b + 1] - a.cu_k[s.b];
  } else {
    s.b = static_cast<int>(row / a.Sq);
    s.i = static_cast<int>(row % a.Sq);
    s.rows = a.Sq;
    s.k_row = std::int64_t{s.b} * a.Sk;
    s.keys = a.used_k != nullptr ? a.used_k[s.b] : a.Sk;
  }
  s.q_row = row;
  s.off = s.keys - s.rows;
  return s;
}

__device__ std::int64_t row_of_key(const Attention& a, const Sequence& s, int j) {
  if (a.page_table == nullptr) return s.k_row + j;
  return std::int64_t{a.page_table[s.b * a.max_pages + j / a.page_size]} * a.page_size + j % a.page_size;
}

__device__ double scale_of(const Attention& a, const float* scales, int heads, int b, std::int64_t row, int head) {
  if (scales == nullptr) return 1.0;
  return static_cast<double>(scales[(a.scales_by_head ? b : row) * heads + head]);
}

// Eight neighbours from a multiple of eight on, in loads of 8 or 16 bytes.
__device__ void load_eight(const void* data, DType dtype, std::int64_t at, float (&x)[8]) {
  const auto* bytes = static_cast<const std::byte*>(data) + at * (dtype == DType::f32      ? 4
                                                                  : dtype == DType::f8e4m3 ? 1
                                                                                           : 2);
  if (dtype == DType::f32) {
    const float4 low = *reinterpret_cast<const float4*>(bytes), high = *reinterpret_cast<const float4*>(bytes + 16);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  } else if (dtype == DType::f8e4m3) {
    __nv_fp8_e4m3 v[8];
    *reinterpret_cast<uint2*>(v) = *reinterpret_cast<const uint2*>(bytes);
    for (int n = 0; n < 8; ++n) x[n] = static_cast<float>(v[n]);
  } else if (dtype == DType::f16) {
    __half v[8];
    *reinterpret_cast<uint4*>(v) = *reinterpret_cast<const uint4*>(bytes);
    for (int n = 0; n < 8; ++n) x[n] = __half2float(v[n]);
  } else {
    __nv_bfloat16 v[8];
    *reinterpret_cast<uint4*>(v) = *reinterpret_cast<const uint4*>(bytes);
    for (int n = 0; n < 8; ++n) x[n] = __bfloat162float(v[n]);
  }
}

__device__ double dot(const void* x, DType x_dtype, std::int64_t x_at, const void* y, DType y_dtype, std::int64_t y_at,
                      int size) {
  double sum = 0;
  for (int d = 0; d < size; d += 8) {
    float some[8], others[8];
    load_eight(x, x_dtype, x_at + d, some);
    load_eight(y, y_dtype, y_at + d, others);
    for (int n = 0; n < 8; ++n) sum += static_cast<double>(some[n]) * static_cast<double>(others[n]);
  }
  return sum;
}

// The logit of a pair, and its derivative by q . k; -inf if the pair is removed.
__device__ double logit(const Attention& a, const Sequence& s, int h, int j, double& derivative) {
  derivative = 0;
  const int at = s.i + s.off;
  if ((a.causal && j > at) || (a.left >= 0 && j < at - a.left) || (a.right >= 0 && j > at + a.right)) return -INFINITY;
  if (a.mask != nullptr &&
      a.mask[s.b * a.mask_stride[0] + h * a.mask_stride[1] + s.i * a.mask_stride[2] + j * a.mask_stride[3]] == 0)
    return -INFINITY;
  const int kv = h / (a.H / a.Hkv);
  const std::int64_t key = row_of_key(a, s, j);
  double x = dot(a.q, a.q_dtype, (s.q_row * a.H + h) * a.D, a.k, a.k_dtype, (key * a.Hkv + kv) * a.D, a.D) * a.scale *
             scale_of(a, a.q_scale, a.H, s.b, s.q_row, h) * scale_of(a, a.k_scale, a.Hkv, s.b, key, kv);
  derivative = a.scale;
  if (a.softcap > 0) {
    const double tanh_of = tanh(x / a.softcap);
    x = a.softcap * tanh_of;
    derivative *= 1 - tanh_of * tanh_of;
  }
  if (a.alibi != nullptr) x -= static_cast<double>(a.alibi[h]) * abs(at - j);
  if (a.bias != nullptr) {
    x += load(a.bias, a.bias_dtype,
              s.b * a.bias_stride[0] + h * a.bias_stride[1] + s.i * a.bias_stride[2] + j * a.bias_stride[3]);
  }
  return x;
}

// Of all threads of a block, in `scratch` of as many doubles.
template <class Join>
__device__ double joined(double x, double* scratch, const Join& join) {
  __syncthreads();
  scratch[threadIdx.x] = x;
  __syncthreads();
  for (unsigned step = blockDim.x / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) scratch[threadIdx.x] = join(scratch[threadIdx.x], scratch[threadIdx.x + step]);
    __syncthreads();
  }
  return scratch[0];
}

constexpr int kThreads = 128;

// A block for each row and head.
__global__ void forward_kernel(const Attention a, double* o, double* lse) {
  extern __shared__ double weights[];
  __shared__ double scratch[kThreads];
  const int h = static_cast<int>(blockIdx.y), kv = h / (a.H / a.Hkv);
  const Sequence s = sequence_of(a, blockIdx.x);
  double top = -INFINITY, derivative;
  for (int j = threadIdx.x; j < s.keys; j += kThreads) {
    weights[j] = logit(a, s, h, j, derivative);
    top = fmax(top, weights[j]);
  }
  top = joined(top, scratch, [](double x, double y) { return fmax(x, y); });
  if (a.sink != nullptr) top = fmax(top, static_cast<double>(a.sink[h]));
  double sum = 0;
  for (int j = threadIdx.x; j < s.keys; j += kThreads) {
    weights[j] = top == -INFINITY ? 0.0 : exp(weights[j] - top);
    sum += weights[j];
  }
  sum = joined(sum, scratch, [](double x, double y) { return x + y; });
  if (a.sink != nullptr) sum += exp(a.sink[h] - top);
  for (int d = threadIdx.x; d < a.Dv; d += kThreads) {
    double out = 0;
    for (int j = 0; j < s.keys; ++j) {
      const std::int64_t key = row_of_key(a, s, j);
      out += weights[j] * load(a.v, a.k_dtype, (key * a.Hkv + kv) * a.Dv + d) *
             scale_of(a, a.v_scale, a.Hkv, s.b, key, kv);
    }
    o[(s.q_row * a.H + h) * a.Dv + d] = sum > 0 ? out / sum : 0.0;
  }
  if (threadIdx.x == 0) {
    const std::int64_t at =
        a.cu_q != nullptr ? std::int64_t{h} * a.total_q + s.q_row : (std::int64_t{s.b} * a.H + h) * a.Sq + s.i;
    lse[at] = sum > 0 ? top + log(sum) : -INFINITY;
  }
}

// p and dS of a pair, from lse and delta of its row.
struct PairGradient {
  double p, ds;
};
__device__ PairGradient pair_gradient(const Attention& a, const Sequence& s, int h, int j, const void* d_o, double lse,
                                      double delta) {
  double derivative;
  const double x = logit(a, s, h, j, derivative);
  const double p = x == -INFINITY ? 0.0 : exp(x - lse);
  const int kv = h / (a.H / a.Hkv);
  const double dp =
      dot(d_o, a.q_dtype, (s.q_row * a.H + h) * a.Dv, a.v, a.k_dtype, (row_of_key(a, s, j) * a.Hkv + kv) * a.Dv, a.Dv);
  return {p, p * (dp - delta) * derivative};
}

__device__ double lse_of(const Attention& a, const Sequence& s, int h, const double* lse) {
  return lse[a.cu_q != nullptr ? std::int64_t{h} * a.total_q + s.q_row : (std::int64_t{s.b} * a.H + h) * a.Sq + s.i];
}

// dO . o of each row and head.
__global__ void delta_kernel(const void* d_o, DType dtype, const double* o, std::int64_t count, int size,
                             double* delta) {
  const std::int64_t n = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x;
  if (n >= count) return;
  delta[n] = 0;
  for (int d = 0; d < size; ++d) delta[n] += load(d_o, dtype, n * size + d) * o[n * size + d];
}

// A block for each row and head.
__global__ void dq_kernel(const Attention a, const void* d_o, const double* delta, const double* lse, double* dq) {
  extern __shared__ double weights[];
  const int h = static_cast<int>(blockIdx.y), kv = h / (a.H / a.Hkv);
  const Sequence s = sequence_of(a, blockIdx.x);
  const double row_lse = lse_of(a, s, h, lse), row_delta = delta[s.q_row * a.H + h];
  for (int j = threadIdx.x; j < s.keys; j += kThreads) {
    weights[j] = pair_gradient(a, s, h, j, d_o, row_lse, row_delta).ds;
  }
  __syncthreads();
  for (int d = threadIdx.x; d < a.D; d += kThreads) {
    double sum = 0;
    for (int j = 0; j < s.keys; ++j)
      sum += weights[j] * load(a.k, a.k_dtype, (row_of_key(a, s, j) * a.Hkv + kv) * a.D + d);
    dq[(s.q_row * a.H + h) * a.D + d] = sum;
  }
}

// A block for each key and kv head; the sequence's rows pass by in turn.
__global__ void dk_dv_kernel(const Attention a, const void* d_o, const double* delta, const double* lse, double* dk,
                             double* dv) {
  __shared__ double p[kThreads], ds[kThreads];
  const int kv = static_cast<int>(blockIdx.y), group = a.H / a.Hkv;
  int b = 0;
  if (a.cu_k != nullptr) {
    while (a.cu_k[b + 1] <= static_cast<int>(blockIdx.x)) ++b;
  } else {
    b = static_cast<int>(blockIdx.x) / a.Sk;
  }
  const std::int64_t first = a.cu_q != nullptr ? a.cu_q[b] : std::int64_t{b} * a.Sq;
  const int rows = a.cu_q != nullptr ? a.cu_q[b + 1] - a.cu_q[b] : a.Sq;
  const int j = static_cast<int>(blockIdx.x) - (a.cu_k != nullptr ? a.cu_k[b] : b * a.Sk);
  double k_sum[2] = {}, v_sum[2] = {};  // of dims threadIdx.x and threadIdx.x + kThreads
  for (int begin = 0; begin < rows * group; begin += kThreads) {
    const int n = begin + static_cast<int>(threadIdx.x);
    PairGradient pair{};
    if (n < rows * group) {
      const int h = kv * group + n % group;
      const Sequence s = sequence_of(a, first + n / group);
      pair = pair_gradient(a, s, h, j, d_o, lse_of(a, s, h, lse), delta[s.q_row * a.H + h]);
    }
    __syncthreads();
    p[threadIdx.x] = pair.p;
    ds[threadIdx.x] = pair.ds;
    __syncthreads();
    for (int m = 0; m < min(kThreads, rows * group - begin); ++m) {
      const std::int64_t row = (first + (begin + m) / group) * a.H + kv * group + (begin + m) % group;
      for (int part = 0; part < 2; ++part) {
        const int d = static_cast<int>(threadIdx.x) + part * kThreads;
        if (d < a.D) k_sum[part] += ds[m] * load(a.q, a.q_dtype, row * a.D + d);
        if (d < a.Dv) v_sum[part] += p[m] * load(d_o, a.q_dtype, row * a.Dv + d);
      }
    }
  }
  const std::int64_t to = std::int64_t{blockIdx.x} * a.Hkv + kv;
  for (int part = 0; part < 2; ++part) {
    const int d = static_cast<int>(threadIdx.x) + part * kThreads;
    if (d < a.D) dk[to * a.D + d] = k_sum[part];
    if (d < a.Dv) dv[to * a.Dv + d] = v_sum[part];
  }
}

__global__ void product_kernel(const void* x, DType dtype, const float* w, std::int64_t rows, std::int64_t n,
                               std::int64_t k, double* y) {
  const std::int64_t column = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x;
  if (column >= n) return;
  double sum = 0;
  for (std::int64_t i = 0; i < k; ++i)
    sum += load(x, dtype, blockIdx.y * k + i) * static_cast<double>(w[column * k + i]);
  y[blockIdx.y * n + column] = sum;
}

std::size_t score_bytes(const Attention& a) { return sizeof(double) * static_cast<std::size_t>(a.Sk); }

template <class Kernel>
void allow_shared(Kernel* kernel, std::size_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
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

void reference_forward(const Attention& a, double* o, double* lse) {
  allow_shared(forward_kernel, score_bytes(a));
  forward_kernel<<<dim3(static_cast<unsigned>(a.rows()), static_cast<unsigned>(a.H)), kThreads, score_bytes(a)>>>(a, o,
                                                                                                                  lse);
  check(cudaGetLastError());
}

void reference_backward(const Attention& a, const void* d_o, const double* o, const double* lse, double* dq, double* dk,
                        double* dv) {
  allow_shared(dq_kernel, score_bytes(a));
  const std::int64_t count = a.rows() * a.H;
  double* delta = nullptr;
  check(cudaMalloc(&delta, sizeof(double) * static_cast<std::size_t>(count)));
  delta_kernel<<<static_cast<unsigned>((count + 255) / 256), 256>>>(d_o, a.q_dtype, o, count, a.Dv, delta);
  dq_kernel<<<dim3(static_cast<unsigned>(a.rows()), static_cast<unsigned>(a.H)), kThreads, score_bytes(a)>>>(
      a, d_o, delta, lse, dq);
  const std::int64_t keys = a.cu_k != nullptr ? a.total_q : std::int64_t{a.B} * a.Sk;
  dk_dv_kernel<<<dim3(static_cast<unsigned>(keys), static_cast<unsigned>(a.Hkv)), kThreads>>>(a, d_o, delta, lse, dk,
                                                                                              dv);
  check(cudaGetLastError());
  check(cudaDeviceSynchronize());
  check(cudaFree(delta));
}

void reference_product(const void* x, DType dtype, const float* w, std::int64_t rows, std::int64_t n, std::int64_t k,
                       double* y) {
  product_kernel<<<dim3(static_cast<unsigned>((n + 127) / 128), static_cast<unsigned>(rows)), 128>>>(x, dtype, w, rows,
                                                                                                     n, k, y);
  check(cudaGetLastError());
}

void fill_bytes(void* to, int value, std::size_t bytes, void* stream) {
  check(cudaMemsetAsync(to, value, bytes, static_cast<cudaStream_t>(stream)));
}

void copy_bytes(void* to, const void* from, std::size_t bytes, void* stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)));
}

void finish() { check(cudaDeviceSynchronize()); }

}  // namespace heddle::soak
