#include <cmath>

#include "soak/elements.cuh"
#include "soak/reference.h"

namespace heddle::soak {
namespace {

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
  s.off = a.key_step > 1 ? 0 : s.keys - s.rows;
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
  const int at = s.i + s.off, key_at = a.key_step * j;
  if ((a.causal && key_at > at) || (a.left >= 0 && key_at < at - a.left) || (a.right >= 0 && key_at > at + a.right))
    return -INFINITY;
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

constexpr int kThreads = 128, kColumns = 2;  // of a row that a thread adds up: threadIdx.x, threadIdx.x + kThreads
constexpr int kChunk = 1024;                 // keys whose weights are in shared memory at a time

__device__ std::int64_t lse_at(const Attention& a, const Sequence& s, int h) {
  return a.cu_q != nullptr ? std::int64_t{h} * a.total_q + s.q_row : (std::int64_t{s.b} * a.H + h) * a.Sq + s.i;
}

// A block for each row and head.
__global__ void forward_kernel(const Attention a, double* o, double* lse) {
  __shared__ double weights[kChunk], scratch[kThreads];
  const int h = static_cast<int>(blockIdx.y), kv = h / (a.H / a.Hkv);
  const Sequence s = sequence_of(a, blockIdx.x);
  double top = a.sink != nullptr ? static_cast<double>(a.sink[h]) : -INFINITY, derivative;
  double sum = a.sink != nullptr ? 1.0 : 0.0, out[kColumns] = {};
  for (int first = 0; first < s.keys; first += kChunk) {
    const int count = min(kChunk, s.keys - first);
    double highest = top;
    for (int j = threadIdx.x; j < count; j += kThreads) {
      weights[j] = logit(a, s, h, first + j, derivative);
      highest = fmax(highest, weights[j]);
    }
    highest = joined(highest, scratch, [](double x, double y) { return fmax(x, y); });
    if (highest > -INFINITY) {  // alike in all threads
      double added = 0;
      for (int j = threadIdx.x; j < count; j += kThreads) {
        weights[j] = exp(weights[j] - highest);
        added += weights[j];
      }
      added = joined(added, scratch, [](double x, double y) { return x + y; });
      const double keep = exp(top - highest);
      sum = sum * keep + added;
      for (int part = 0; part < kColumns; ++part) {
        const int d = static_cast<int>(threadIdx.x) + part * kThreads;
        if (d >= a.Dv) break;
        out[part] *= keep;
        for (int j = 0; j < count; ++j) {
          if (weights[j] == 0) continue;  // its value may be NaN
          const std::int64_t key = row_of_key(a, s, first + j);
          out[part] += weights[j] * load(a.v, a.k_dtype, (key * a.Hkv + kv) * a.Dv + d) *
                       scale_of(a, a.v_scale, a.Hkv, s.b, key, kv);
        }
      }
      top = highest;
    }
    __syncthreads();  // the next keys' weights take the place of these
  }
  for (int part = 0; part < kColumns; ++part) {
    const int d = static_cast<int>(threadIdx.x) + part * kThreads;
    if (d < a.Dv) o[(s.q_row * a.H + h) * a.Dv + d] = sum > 0 ? out[part] / sum : 0.0;
  }
  if (threadIdx.x == 0) lse[lse_at(a, s, h)] = sum > 0 ? top + log(sum) : -INFINITY;
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
  __shared__ double weights[kChunk];
  const int h = static_cast<int>(blockIdx.y), kv = h / (a.H / a.Hkv);
  const Sequence s = sequence_of(a, blockIdx.x);
  const double row_lse = lse[lse_at(a, s, h)], row_delta = delta[s.q_row * a.H + h];
  double sum[kColumns] = {};
  for (int first = 0; first < s.keys; first += kChunk) {
    const int count = min(kChunk, s.keys - first);
    for (int j = threadIdx.x; j < count; j += kThreads) {
      weights[j] = pair_gradient(a, s, h, first + j, d_o, row_lse, row_delta).ds;
    }
    __syncthreads();
    for (int part = 0; part < kColumns; ++part) {
      const int d = static_cast<int>(threadIdx.x) + part * kThreads;
      for (int j = 0; d < a.D && j < count; ++j)
        sum[part] += weights[j] * load(a.k, a.k_dtype, (row_of_key(a, s, first + j) * a.Hkv + kv) * a.D + d);
    }
    __syncthreads();
  }
  for (int part = 0; part < kColumns; ++part) {
    const int d = static_cast<int>(threadIdx.x) + part * kThreads;
    if (d < a.D) dq[(s.q_row * a.H + h) * a.D + d] = sum[part];
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
  double k_sum[kColumns] = {}, v_sum[kColumns] = {};
  for (int begin = 0; begin < rows * group; begin += kThreads) {
    const int n = begin + static_cast<int>(threadIdx.x);
    PairGradient pair{};
    if (n < rows * group) {
      const int h = kv * group + n % group;
      const Sequence s = sequence_of(a, first + n / group);
      pair = pair_gradient(a, s, h, j, d_o, lse[lse_at(a, s, h)], delta[s.q_row * a.H + h]);
    }
    __syncthreads();
    p[threadIdx.x] = pair.p;
    ds[threadIdx.x] = pair.ds;
    __syncthreads();
    for (int m = 0; m < min(kThreads, rows * group - begin); ++m) {
      const std::int64_t row = (first + (begin + m) / group) * a.H + kv * group + (begin + m) % group;
      for (int part = 0; part < kColumns; ++part) {
        const int d = static_cast<int>(threadIdx.x) + part * kThreads;
        if (d < a.D) k_sum[part] += ds[m] * load(a.q, a.q_dtype, row * a.D + d);
        if (d < a.Dv) v_sum[part] += p[m] * load(d_o, a.q_dtype, row * a.Dv + d);
      }
    }
  }
  const std::int64_t to = std::int64_t{blockIdx.x} * a.Hkv + kv;
  for (int part = 0; part < kColumns; ++part) {
    const int d = static_cast<int>(threadIdx.x) + part * kThreads;
    if (d < a.D) dk[to * a.D + d] = k_sum[part];
    if (d < a.Dv) dv[to * a.Dv + d] = v_sum[part];
  }
}

}  // namespace

void reference_forward(const Attention& a, double* o, double* lse) {
  forward_kernel<<<dim3(static_cast<unsigned>(a.rows()), static_cast<unsigned>(a.H)), kThreads>>>(a, o, lse);
  check(cudaGetLastError());
}

void reference_backward(const Attention& a, const void* d_o, const double* o, const double* lse, double* dq, double* dk,
                        double* dv) {
  const std::int64_t count = a.rows() * a.H;
  double* delta = nullptr;
  check(cudaMalloc(&delta, sizeof(double) * static_cast<std::size_t>(count)));
  delta_kernel<<<static_cast<unsigned>((count + 255) / 256), 256>>>(d_o, a.q_dtype, o, count, a.Dv, delta);
  dq_kernel<<<dim3(static_cast<unsigned>(a.rows()), static_cast<unsigned>(a.H)), kThreads>>>(a, d_o, delta, lse, dq);
  const std::int64_t keys = a.cu_k != nullptr ? a.total_q : std::int64_t{a.B} * a.Sk;
  dk_dv_kernel<<<dim3(static_cast<unsigned>(keys), static_cast<unsigned>(a.Hkv)), kThreads>>>(a, d_o, delta, lse, dk,
                                                                                              dv);
  check(cudaGetLastError());
  check(cudaDeviceSynchronize());
  check(cudaFree(delta));
}

}  // namespace heddle::soak
