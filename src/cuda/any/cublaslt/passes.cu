#include "cuda/any/cublaslt/passes.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/any/lowbit/pieces.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/ptx/arithmetic.cuh"

namespace heddle::cuda::cublaslt {
namespace {

using any::lowbit::Units;

constexpr int kThreads = 256, kFour = 4;

template <class T>
__device__ float widened(T x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(x);
  } else {
    return __bfloat162float(x);
  }
}
template <class T>
__device__ T narrowed(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

// `count` elements from `from`, zeros behind them; aligned: all four at once.
template <class T, int kCount>
__device__ void load(const void* from, std::int64_t at, bool aligned, int count, float (&x)[kCount]) {
  const T* const here = static_cast<const T*>(from) + at;
  if (aligned && count == kCount) {
    std::uint32_t words[kCount / 2];
    if constexpr (kCount == 4) {
      const uint2 two = *reinterpret_cast<const uint2*>(here);
      words[0] = two.x, words[1] = two.y;
    } else {
      words[0] = *reinterpret_cast<const std::uint32_t*>(here);
    }
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float2 two = ptx::unpack2<T>(words[i]);
      x[2 * i] = two.x, x[2 * i + 1] = two.y;
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) x[j] = j < count ? widened(here[j]) : 0.0f;
}
template <class T, int kCount>
__device__ void store(void* to, std::int64_t at, bool aligned, int count, const float (&x)[kCount]) {
  T* const here = static_cast<T*>(to) + at;
  if (aligned && count == kCount) {
    if constexpr (kCount == 4) {
      *reinterpret_cast<uint2*>(here) = make_uint2(ptx::pack2<T>(x[0], x[1]), ptx::pack2<T>(x[2], x[3]));
    } else {
      *reinterpret_cast<std::uint32_t*>(here) = ptx::pack2<T>(x[0], x[1]);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if (j < count) here[j] = narrowed<T>(x[j]);
  }
}

__device__ inline float silu(float x) { return x / (1.0f + expf(-x)); }
constexpr float kTanhFactor = 0.7978845608028654f, kTanhCube = 0.044715f;  // sqrt(2 / pi)

__device__ inline float activated(Activation activation, float x) {
  switch (activation) {
    case Activation::relu:
      return x < 0.0f ? 0.0f : x;
    case Activation::gelu_erf:
      return x * 0.5f * (1.0f + erff(x * 0.7071067811865476f));
    case Activation::gelu_tanh:
      return x * 0.5f * (1.0f + tanhf(kTanhFactor * (x + kTanhCube * x * x * x)));
    case Activation::silu:
      return silu(x);
    default:
      return x;
  }
}

__device__ inline float silu_slope(float z) {
  const float s = 1.0f / (1.0f + expf(-z));
  return s * (1.0f + z * (1.0f - s));
}

// activation'(z). Beyond 10^3 none changes any more, and at infinity the formulas would give NaN.
__device__ inline float slope(Activation activation, float given) {
  const float z = fabsf(given) > 1e3f ? copysignf(1e3f, given) : given;
  switch (activation) {
    case Activation::relu:
      return z <= 0.0f ? 0.0f : z > 0.0f ? 1.0f : z;
    case Activation::gelu_erf:
      return 0.5f * (1.0f + erff(z * 0.7071067811865476f)) + z * expf(-0.5f * z * z) * 0.3989422804014327f;
    case Activation::gelu_tanh: {
      const float t = tanhf(kTanhFactor * (z + kTanhCube * z * z * z));
      return 0.5f * (1.0f + t) + 0.5f * z * (1.0f - t * t) * kTanhFactor * (1.0f + 3.0f * kTanhCube * z * z);
    }
    case Activation::silu:
      return silu_slope(z);
    default:
      return 1.0f;
  }
}

// Four sums with scales and bias.
template <class T>
__device__ void load_sums(const Sums& s, std::int64_t m, std::int64_t n, int count, float (&z)[kFour]) {
  const std::int64_t at = m * s.stride + n;
  if (s.integers) {
    const int4 four = *reinterpret_cast<const int4*>(static_cast<const std::int32_t*>(s.data) + at);
    z[0] = static_cast<float>(four.x), z[1] = static_cast<float>(four.y);
    z[2] = static_cast<float>(four.z), z[3] = static_cast<float>(four.w);
  } else {
    const float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(s.data) + at);
    z[0] = four.x, z[1] = four.y, z[2] = four.z, z[3] = four.w;
  }
  const float token = s.token_scales != nullptr ? s.token_scales[m] : 1.0f;
#pragma unroll
  for (int j = 0; j < kFour; ++j) {
    if (j >= count) break;
    if (s.row_scales != nullptr) z[j] *= s.row_scales[n + j] * token;
    if (s.bias != nullptr) z[j] += widened(static_cast<const T*>(s.bias)[n + j]);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ Finish p, bool aligned) {
  const Sums& s = p.sums;
  for (Units units(s.rows, static_cast<int>((s.columns + kFour - 1) / kFour)); units.left(); units.next()) {
    const std::int64_t m = (*units).row, n = std::int64_t{(*units).unit} * kFour;
    const int count = static_cast<int>(min(s.columns - n, std::int64_t{kFour}));
    float z[kFour];
    load_sums<T>(s, m, n, count, z);
    if (s.activation == Activation::swiglu) {
      float y[2] = {silu(z[0]) * z[1], silu(z[2]) * z[3]}, residual[2] = {};
      const std::int64_t j = n / 2;
      if (p.residual != nullptr) load<T>(p.residual, m * p.residual_stride + j, aligned, count / 2, residual);
      y[0] += residual[0], y[1] += residual[1];
      store<T>(p.y, m * p.y_stride + j, aligned, count / 2, y);
      continue;
    }
    float residual[kFour] = {};
    if (p.residual != nullptr) load<T>(p.residual, m * p.residual_stride + n, aligned, count, residual);
#pragma unroll
    for (int j = 0; j < kFour; ++j) z[j] = activated(s.activation, z[j]) + residual[j];
    store<T>(p.y, m * p.y_stride + n, aligned, count, z);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) slopes_kernel(const __grid_constant__ Slopes p, bool aligned) {
  const Sums& s = p.sums;
  for (Units units(s.rows, static_cast<int>((s.columns + kFour - 1) / kFour)); units.left(); units.next()) {
    const std::int64_t m = (*units).row, n = std::int64_t{(*units).unit} * kFour;
    const int count = static_cast<int>(min(s.columns - n, std::int64_t{kFour}));
    float z[kFour];
    load_sums<T>(s, m, n, count, z);
    if (s.activation == Activation::swiglu) {
      float dy[2];
      load<T>(p.dy, m * p.dy_stride + n / 2, aligned, count / 2, dy);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float gate = z[2 * j], up = z[2 * j + 1], bounded = fabsf(gate) > 1e3f ? copysignf(1e3f, gate) : gate;
        z[2 * j] = dy[j] * up * silu_slope(bounded);
        z[2 * j + 1] = dy[j] * gate / (1.0f + expf(-bounded));
      }
    } else {
      float dy[kFour];
      load<T>(p.dy, m * p.dy_stride + n, aligned, count, dy);
#pragma unroll
      for (int j = 0; j < kFour; ++j) z[j] = dy[j] * slope(s.activation, z[j]);
    }
    store<T>(p.dz, m * p.dz_stride + n, aligned, count, z);
  }
}

constexpr int kSumColumns = 64;  // of a block: two to a lane

// Block (b, s): columns from 64 b on, over slice s of the rows.
template <class T>
__global__ void __launch_bounds__(kThreads) add_columns_kernel(const __grid_constant__ ColumnSums p, bool first) {
  __shared__ float of_warp[kThreads / 32][kSumColumns];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t blocks = (p.columns + kSumColumns - 1) / kSumColumns, slice = blockIdx.x / blocks;
  const std::int64_t n = blockIdx.x % blocks * kSumColumns + 2 * lane;
  const std::int64_t each = (p.rows + kSlices - 1) / kSlices, end = min((slice + 1) * each, p.rows);
  float sums[2] = {0.0f, 0.0f};
#pragma unroll 4
  for (std::int64_t m = slice * each + warp; m < end; m += kThreads / 32) {
    const T* const row = static_cast<const T*>(p.data) + m * p.stride;
    if (n < p.columns) sums[0] += widened(row[n]);
    if (n + 1 < p.columns) sums[1] += widened(row[n + 1]);
  }
  of_warp[warp][2 * lane] = sums[0];
  of_warp[warp][2 * lane + 1] = sums[1];
  __syncthreads();
  const std::int64_t column = blockIdx.x % blocks * kSumColumns + threadIdx.x;
  if (threadIdx.x >= kSumColumns || column >= p.columns) return;
  float* const to = p.partial + slice * p.columns + column;
  float sum = first ? 0.0f : *to;
#pragma unroll
  for (const auto& sums_of : of_warp) sum += sums_of[threadIdx.x];
  *to = sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads) write_columns_kernel(const __grid_constant__ ColumnSums p, T* to) {
  const std::int64_t n = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= p.columns) return;
  float sum = 0.0f;
#pragma unroll 4
  for (int slice = 0; slice < kSlices; ++slice) sum += p.partial[slice * p.columns + n];
  to[n] = narrowed<T>(sum);
}

Grid grid_of(std::int64_t threads) {
  const std::int64_t most = std::int64_t{8} * current_device().multiprocessors;
  return {.blocks = static_cast<unsigned>(std::clamp<std::int64_t>((threads + kThreads - 1) / kThreads, 0, most)),
          .threads = kThreads};
}
unsigned blocks_of(std::int64_t count, std::int64_t each) { return static_cast<unsigned>((count + each - 1) / each); }

// Whether four elements (two with swiglu) may be moved at once, wherever they begin.
bool moves_four(const void* data, std::int64_t stride, const Sums& s) {
  const std::int64_t elements = s.activation == Activation::swiglu ? 2 : 4;
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(2 * elements) == 0 &&
         stride % elements == 0;
}

std::int64_t fours(const Sums& s) { return s.rows * ((s.columns + kFour - 1) / kFour); }

}  // namespace

void finish(const Finish& p, cudaStream_t stream) {
  const bool aligned = moves_four(p.y, p.y_stride, p.sums) &&
                       (p.residual == nullptr || moves_four(p.residual, p.residual_stride, p.sums));
  start("linear_forward", p.sums.dtype == DType::bf16 ? finish_kernel<__nv_bfloat16> : finish_kernel<__half>,
        grid_of(fours(p.sums)), stream, p, aligned);
}

void slopes(const Slopes& p, cudaStream_t stream) {
  // dz has all columns of the sums.
  const bool aligned =
      moves_four(p.dy, p.dy_stride, p.sums) && p.dz_stride % 4 == 0 && reinterpret_cast<std::uintptr_t>(p.dz) % 8 == 0;
  start("linear_backward", p.sums.dtype == DType::bf16 ? slopes_kernel<__nv_bfloat16> : slopes_kernel<__half>,
        grid_of(fours(p.sums)), stream, p, aligned);
}

void add_columns(const ColumnSums& p, bool first, cudaStream_t stream) {
  const Grid grid{.blocks = blocks_of(p.columns, kSumColumns) * kSlices, .threads = kThreads};
  start("linear_backward", p.dtype == DType::bf16 ? add_columns_kernel<__nv_bfloat16> : add_columns_kernel<__half>,
        grid, stream, p, first);
}

void write_columns(const ColumnSums& p, void* to, cudaStream_t stream) {
  const Grid grid{.blocks = blocks_of(p.columns, kThreads), .threads = kThreads};
  if (p.dtype == DType::bf16) {
    start("linear_backward", write_columns_kernel<__nv_bfloat16>, grid, stream, p, static_cast<__nv_bfloat16*>(to));
  } else {
    start("linear_backward", write_columns_kernel<__half>, grid, stream, p, static_cast<__half*>(to));
  }
}

}  // namespace heddle::cuda::cublaslt
