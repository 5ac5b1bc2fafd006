// The pass over x to its own dtype and to int8.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/any/linear/rows.cuh"
#include "cuda/common/launch.cuh"

namespace heddle::cuda::linear {

void run_rows_pass(const RowsPass& pass, cudaStream_t stream) {
  start("linear_forward",
        pass.dtype == DType::bf16 ? rows_kernel<__nv_bfloat16, RowsTo::same> : rows_kernel<__half, RowsTo::same>,
        grid_of(pass), stream, pass);
}

void run_rows_pass_to_int8(const RowsPass& pass, cudaStream_t stream) {
  start("linear_forward",
        pass.dtype == DType::bf16 ? rows_kernel<__nv_bfloat16, RowsTo::int8> : rows_kernel<__half, RowsTo::int8>,
        grid_of(pass), stream, pass);
}

}  // namespace heddle::cuda::linear
