#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/launch.cuh"
#include "cuda/sm90/linear_w4a8/launch.h"
#include "cuda/sm90/linear_w4a8/quantize.cuh"

namespace heddle::cuda::sm90::linear_w4a8 {

void quantize_rows(DType dtype, const void* x, std::int64_t stride, int rows, int columns, int pitch, std::uint8_t* to,
                   float* scales, cudaStream_t stream) {
  const Grid grid{.blocks = static_cast<unsigned>(rows), .threads = kQuantizeThreads, .overlaps = true};
  const auto go = [&]<class T>(const T* from) {
    start("linear_forward", quantize_rows_kernel<T>, grid, stream, from, stride, columns, pitch, to, scales);
  };
  dtype == DType::bf16 ? go(static_cast<const __nv_bfloat16*>(x)) : go(static_cast<const __half*>(x));
}

}  // namespace heddle::cuda::sm90::linear_w4a8
