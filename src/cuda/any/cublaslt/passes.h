// What is done to the sums of a product beside cuBLASLt: y of them, or the gradient with respect to them. Rows lie one
// stride apart, in elements; pointers are those of the part of a matrix that a pass has.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "problem/linear.h"

namespace heddle::cuda::cublaslt {

// Sums [rows, columns] of a product: columns are rows of W.
struct Sums {
  const void* data = nullptr;  // f32, or i32
  bool integers = false;
  std::int64_t rows = 0, columns = 0, stride = 0;              // stride: a multiple of 4
  const float *row_scales = nullptr, *token_scales = nullptr;  // by column and by row, or null: 1
  const void* bias = nullptr;                                  // [columns] of the call's dtype, or null
  DType dtype = DType::bf16;                                   // f16 or bf16, of bias and of what follows
  Activation activation = Activation::none;                    // swiglu: columns are gates and ups in turn
};

// y = activation(row_scales * token_scales * sum + bias) + residual
struct Finish {
  Sums sums;
  const void* residual = nullptr;  // or null; may be y
  std::int64_t residual_stride = 0;
  void* y = nullptr;
  std::int64_t y_stride = 0;
};
void finish(const Finish& pass, cudaStream_t stream);

// dz, the gradient with respect to sums + bias, of dy.
struct Slopes {
  Sums sums;
  const void* dy = nullptr;
  std::int64_t dy_stride = 0;
  void* dz = nullptr;
  std::int64_t dz_stride = 0;
};
void slopes(const Slopes& pass, cudaStream_t stream);

// Sums of columns: each of kSlices slices of the rows leaves its own, or adds to them, and the last step adds those up
// in their order.
constexpr int kSlices = 32;
struct ColumnSums {
  const void* data = nullptr;
  DType dtype = DType::bf16;
  std::int64_t rows = 0, columns = 0, stride = 0;
  float* partial = nullptr;  // [kSlices][columns]
};
void add_columns(const ColumnSums& pass, bool first, cudaStream_t stream);
void write_columns(const ColumnSums& pass, void* to, cudaStream_t stream);

}  // namespace heddle::cuda::cublaslt
