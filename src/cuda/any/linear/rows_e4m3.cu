// The pass over x to e4m3, which rounds by an instruction that GPUs have from sm_89 on.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/any/linear/rows.cuh"
#include "cuda/common/launch.cuh"

namespace heddle::cuda::linear {

void run_rows_pass_to_e4m3(const RowsPass& pass, cudaStream_t stream) {
  start("linear_forward",
        pass.dtype == DType::bf16 ? rows_kernel<__nv_bfloat16, RowsTo::e4m3> : rows_kernel<__half, RowsTo::e4m3>,
        grid_of(pass), stream, pass);
}

}  // namespace heddle::cuda::linear
