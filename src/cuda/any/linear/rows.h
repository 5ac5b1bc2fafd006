// The pass over rows of x in front of a product: a norm, and rounding to e4m3.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/linear_problem.h"

namespace heddle::cuda::linear {

struct RowsPass {
  DType dtype;    // of x, the norm's parameters, and of `to` unless there are scales: f16 or bf16
  const void* x;  // [rows, columns], `stride` elements apart, rows aligned to 16 bytes
  std::int64_t stride;
  int rows, columns, pitch;  // columns: a multiple of 8
  Norm norm;
  const void *weight, *bias;  // [columns] or null: ones, zeros
  float eps;
  void* to;       // [rows, pitch], zeros behind the columns
  float* scales;  // [rows], or null. Given: `to` is e4m3, each row divided by its scale, so that its largest
                  // magnitude becomes 448. A row that is not finite has scale NaN, which spoils its y.
};

void run_rows_pass(const RowsPass& pass, cudaStream_t stream);          // without scales
void run_rows_pass_to_e4m3(const RowsPass& pass, cudaStream_t stream);  // with scales; Hopper

}  // namespace heddle::cuda::linear
