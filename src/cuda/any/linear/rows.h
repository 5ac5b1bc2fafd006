// The pass over rows of x in front of a product: a norm, and rounding to 8 bits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "problem/linear.h"

namespace heddle::cuda::linear {

struct NormInFront {
  Norm kind;
  const void *weight, *bias;  // [columns], aligned to 16 bytes, or null: ones, zeros
  float eps;
};

struct RowsPass {
  DType dtype;    // of x, the norm's parameters, and of `to` unless that has 8 bits: f16 or bf16
  const void* x;  // [rows, columns], `stride` elements apart, rows aligned to 16 bytes
  std::int64_t stride;
  int rows, columns, pitch;  // columns: a multiple of 8
  NormInFront norm;
  void* to;       // [rows, pitch], zeros behind the columns
  float* scales;  // [rows], where `to` has 8 bits: each row divided by its scale. A row that is not finite has
                  // scale NaN, which spoils its y.
  bool interleaved = false;  // to_e4m3: of each 32 columns the first halves of four eights, then the second halves
};

void run_rows_pass(const RowsPass& pass, cudaStream_t stream);          // to x's dtype
void run_rows_pass_to_e4m3(const RowsPass& pass, cudaStream_t stream);  // the largest magnitude 448; from sm_89 on
void run_rows_pass_to_int8(const RowsPass& pass, cudaStream_t stream);  // the largest magnitude 127

}  // namespace heddle::cuda::linear
