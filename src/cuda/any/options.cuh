// The options of attention for one pair at a time, as the definition reads: what the kernels of this room share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "problem/attention.h"
#include "problem/philox.h"

namespace heddle::cuda::any {

// Element d of a row of q, k or v, widened. T: operand_dtype(p), which an operand has that is not f8e4m3.
template <class T>
__device__ inline float element(const Operand& x, const std::byte* row, std::int64_t d) {
  if (x.dtype == DType::f8e4m3) {
    const auto bits = static_cast<__nv_fp8_storage_t>(row[d * x.stride_d]);
    return static_cast<float>(__half(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3)));
  }
  return static_cast<float>(reinterpret_cast<const T*>(row)[d * x.stride_d]);
}

// Logit of row i and key j, whose band holds both; -inf where a mask or bias removes the pair, whatever the product
// was. T: operand_dtype(p), which a bias has that is not f32.
template <class T>
__device__ inline float logit(const AttentionProblem& p, const Sequence& s, std::int64_t b, std::int64_t h,
                              std::int64_t i, std::int64_t j, float product) {
  if (p.draft_removes(b, s, i, j)) return -INFINITY;
  const std::int64_t column = s.key_offset + j;
  if (p.mask.data != nullptr && p.mask.data[p.mask.offset(b, h, i, column)] == std::byte{0}) return -INFINITY;
  float x = p.scale * product;
  if (p.softcap > 0) x = p.softcap * tanhf(x / p.softcap);
  if (p.alibi.data != nullptr) {
    const std::int64_t distance = i + s.off - j;
    const float slope = reinterpret_cast<const float*>(p.alibi.data)[p.alibi.offset(b, h, 0)];
    x -= slope * static_cast<float>(distance < 0 ? -distance : distance);
  }
  if (p.bias.data != nullptr) {
    const std::int64_t at = p.bias.offset(b, h, i, column);
    const float bias = p.bias.dtype == DType::f32 ? reinterpret_cast<const float*>(p.bias.data)[at]
                                                  : static_cast<float>(reinterpret_cast<const T*>(p.bias.data)[at]);
    x = bias == -INFINITY ? -INFINITY : x + bias;
  }
  return x;
}

// What exponents are taken relative to: -inf must not be subtracted from -inf.
__device__ inline float base_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

__device__ inline float sink_of(const AttentionProblem& p, std::int64_t h) {
  return p.sink.data == nullptr ? -INFINITY : reinterpret_cast<const float*>(p.sink.data)[h * p.sink.stride_h];
}

// 1 / (1 - p) for a probability that dropout keeps, or 0. drop_below: dropout_threshold(p).
__device__ inline float dropout_factor(const AttentionProblem& p, std::uint32_t drop_below, const Sequence& s,
                                       std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  if (drop_below == 0) return 1.0f;
  const auto row = static_cast<std::uint32_t>(s.q_offset + i), key = static_cast<std::uint32_t>(s.key_offset + j);
  const auto words = dropout_words(p.dropout, static_cast<std::uint32_t>(b * p.H + h), row, key / 4);
  const std::uint32_t low = key % 2 == 0 ? words[0] : words[1], high = key % 2 == 0 ? words[2] : words[3];
  return (key % 4 < 2 ? low : high) >= drop_below ? 1.0f / (1.0f - p.dropout.p) : 0.0f;
}

// Element d of a row of o, whose dtype need not be that of what was multiplied.
__device__ inline void store_output(const Operand& o, std::byte* row, std::int64_t d, float x) {
  const std::int64_t at = d * o.stride_d;
  if (o.dtype == DType::f32) {
    reinterpret_cast<float*>(row)[at] = x;
  } else if (o.dtype == DType::f16) {
    reinterpret_cast<__half*>(row)[at] = static_cast<__half>(x);
  } else {
    reinterpret_cast<__nv_bfloat16*>(row)[at] = static_cast<__nv_bfloat16>(x);
  }
}

// sum: of exp(score - base). Without a key or a sink it is 0.
__device__ inline void store_lse(const AttentionProblem& p, const Sequence& s, std::int64_t b, std::int64_t h,
                                 std::int64_t i, float base, float sum) {
  if (p.lse.data == nullptr) return;
  reinterpret_cast<float*>(p.lse.data)[p.lse.offset(b, h, s.q_begin + i)] = sum == 0 ? -INFINITY : base + logf(sum);
}

}  // namespace heddle::cuda::any
