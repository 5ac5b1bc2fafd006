// Row-wise steps of the encoder between its matrix products, vectorised for the processor at hand. Activations are f32
// or bf16 ("dtype" below); every sum, mean and exponential is f32. Pointers need no alignment.
#pragma once

#include <cstdint>

#include "heddle/tensor.h"

namespace heddle {

// out[i] = gelu(x[i]) = x/2 (1 + erf(x / sqrt(2))), i < count. out may be x if dtype is f32.
void gelu(const float* x, std::int64_t count, DType dtype, void* out);

struct LayerNormRows {
  const float* gamma;  // [columns]
  const float* beta;   // [columns]
  float epsilon;
  std::int64_t columns;
};

// out[r] = layer_norm(x[r] + residual[r]) for `rows` rows, contiguous. residual (of `dtype`) may be null, and may be
// out. x is overwritten.
void residual_layer_norm(float* x, const void* residual, std::int64_t rows, const LayerNormRows& norm, DType dtype,
                         void* out);

// out[i] = a[i] + b[i] + c[i]; a, b, c of `dtype`.
void add_three(const void* a, const void* b, const void* c, std::int64_t count, DType dtype, float* out);

// sum[i] += x[i]; x of `dtype`.
void accumulate(const void* x, std::int64_t count, DType dtype, float* sum);

// f32 from bf16 and back, to nearest even.
void widen(const std::uint16_t* x, std::int64_t count, float* out);
void narrow(const float* x, std::int64_t count, std::uint16_t* out);

// The same steps as one SIMD target has them (see cpu/kernels.h); bf16 as its bits.
struct RowKernels {
  void (*gelu_f32)(const float* x, std::int64_t count, float* out);
  void (*gelu_bf16)(const float* x, std::int64_t count, std::uint16_t* out);
  void (*layer_norm_f32)(float* x, const float* residual, std::int64_t rows, const LayerNormRows& norm, float* out);
  void (*layer_norm_bf16)(float* x, const std::uint16_t* residual, std::int64_t rows, const LayerNormRows& norm,
                          std::uint16_t* out);
  void (*add_three_f32)(const float* a, const float* b, const float* c, std::int64_t count, float* out);
  void (*add_three_bf16)(const std::uint16_t* a, const std::uint16_t* b, const std::uint16_t* c, std::int64_t count,
                         float* out);
  void (*accumulate_f32)(const float* x, std::int64_t count, float* sum);
  void (*accumulate_bf16)(const std::uint16_t* x, std::int64_t count, float* sum);
  void (*widen)(const std::uint16_t* x, std::int64_t count, float* out);
  void (*narrow)(const float* x, std::int64_t count, std::uint16_t* out);
};

}  // namespace heddle
