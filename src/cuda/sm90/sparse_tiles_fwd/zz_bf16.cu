#include "cuda/sm90/sparse_tiles_fwd/launch.cuh"
namespace heddle::cuda::sm90::sparse_tiles_fwd {
template struct Instance<DType::bf16, row_named(kVariants, "d64")>;
template struct Instance<DType::bf16, row_named(kVariants, "d64 blocks of 64")>;
template struct Instance<DType::bf16, row_named(kVariants, "d128")>;
template struct Instance<DType::bf16, row_named(kVariants, "d128 blocks of 64")>;
}
