#include "cuda/sm90/sparse_tiles_fwd/order.h"

#include "cuda/common/launch.cuh"
#include "cuda/sm90/sparse_tiles_fwd/order.cuh"

namespace heddle::cuda::sm90::sparse_tiles_fwd {

void launch_order(const attention_fwd::Params& params, int* order, cudaStream_t stream) {
  const int size = params.section * params.q_tiles;
  start("sparse_attention_forward", order_kernel,
        {static_cast<unsigned>((params.tiles + size - 1) / size), kOrderThreads}, stream, params, order);
}

}  // namespace heddle::cuda::sm90::sparse_tiles_fwd
