#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/launch.cuh"
#include "cuda/sm90/linear/rows.cuh"

namespace heddle::cuda::sm90::linear {

void run_rows_pass(const RowsPass& pass, cudaStream_t stream) {
  const Grid grid{.blocks = static_cast<unsigned>(pass.rows), .threads = kRowThreads, .overlaps = true};
  const bool bf16 = pass.dtype == DType::bf16, narrow = pass.scales != nullptr;
  start("linear_forward",
        bf16 ? (narrow ? rows_kernel<__nv_bfloat16, true> : rows_kernel<__nv_bfloat16, false>)
             : (narrow ? rows_kernel<__half, true> : rows_kernel<__half, false>),
        grid, stream, pass);
}

}  // namespace heddle::cuda::sm90::linear
