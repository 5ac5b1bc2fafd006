// Which instantiation, and the launch.
#include <algorithm>
#include <limits>

#include "cuda/any/kv_cache/host.h"
#include "cuda/any/kv_cache/row_scales.cuh"
#include "cuda/common/launch.cuh"

namespace heddle::cuda {
namespace {

using namespace any::kv_cache;

template <class T>
struct KindOfData {
  using Kind = InKind<T>;
  __device__ Kind k(int) const { return {}; }
  __device__ Kind v(int) const { return {}; }
};

template <class T>
struct E4m3 {
  using Kind = InE4m3<T>;
  Scales k_scale, v_scale;
  __device__ Kind k(int h) const { return {k_scale.at(0, 0, h)}; }
  __device__ Kind v(int h) const { return {v_scale.at(0, 0, h)}; }
};

// Rows can be moved in pieces of `width` elements.
bool in_pieces(const Operand& x, int width) {
  return reinterpret_cast<std::uintptr_t>(x.data) % (width * size_of(x.dtype)) == 0 && x.stride_d == 1 &&
         x.stride_b % width == 0 && x.stride_s % width == 0 && x.stride_h % width == 0;
}

bool in_pieces(std::int64_t head_size, std::int64_t rotated, int width) {
  return head_size % width == 0 && rotated % (2 * width) == 0;
}

unsigned blocks(std::int64_t rows) {
  return static_cast<unsigned>(std::min<std::int64_t>(rows, std::numeric_limits<std::int32_t>::max()));
}

template <class T>
void rotate(const RotaryProblem& p, cudaStream_t stream) {
  constexpr int kWidth = 16 / sizeof(T);
  const bool wide = in_pieces(p.x, kWidth) && in_pieces(p.out, kWidth) && in_pieces(p.D, p.rotary.dims, kWidth);
  start("apply_rotary", wide ? rotary_kernel<T, kWidth> : rotary_kernel<T, 1>, {blocks(p.B * p.S), kThreads}, stream,
        p);
}

template <class T, class Kinds>
void append_as(const AppendProblem& p, const Kinds& kinds, cudaStream_t stream) {
  constexpr int kWidth = 16 / sizeof(T);
  const bool wide = in_pieces(p.k_new, kWidth) && in_pieces(p.v_new, kWidth) && in_pieces(p.k_cache, kWidth) &&
                    in_pieces(p.v_cache, kWidth) && in_pieces(p.D, p.rotary.dims, kWidth) && in_pieces(p.Dv, 0, kWidth);
  const auto kernel = wide ? append_kernel<T, Kinds, kWidth> : append_kernel<T, Kinds, 1>;
  start("append_kv_cache", kernel, {blocks(p.B * p.S), kThreads}, stream, p, kinds);
}

template <class T>
void append(const AppendProblem& p, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (p.finds_k_scale || p.finds_v_scale) {
      return start("append_kv_cache", append_scaled_kernel<T>, {blocks(p.B * p.S), kThreads}, stream, p);
    }
    if (p.k_cache.dtype == DType::f8e4m3) return append_as<T>(p, E4m3<T>{p.k_scale, p.v_scale}, stream);
  }
  append_as<T>(p, KindOfData<T>(), stream);
}

}  // namespace

void apply_rotary(const RotaryProblem& p, void* stream) {
  if (p.B * p.S * p.H * p.D == 0) return;
  const auto launch = p.x.dtype == DType::f32   ? rotate<float>
                      : p.x.dtype == DType::f16 ? rotate<__half>
                                                : rotate<__nv_bfloat16>;
  launch(p, static_cast<cudaStream_t>(stream));
}

void append_kv_cache(const AppendProblem& p, void* stream) {
  if (p.B * p.S * p.Hkv == 0) return;
  const auto launch = p.k_new.dtype == DType::f32   ? append<float>
                      : p.k_new.dtype == DType::f16 ? append<__half>
                                                    : append<__nv_bfloat16>;
  launch(p, static_cast<cudaStream_t>(stream));
}

}  // namespace heddle::cuda
