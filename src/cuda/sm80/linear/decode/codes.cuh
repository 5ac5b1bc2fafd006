// What decoders have in common: where a thread finds its codes, and the scales of groups.
#pragma once

#include <cuda_fp16.h>

#include "cuda/any/linear/schedule.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/shared.cuh"
#include "cuda/sm80/linear/params.h"

namespace heddle::cuda::sm80::linear {

// A decoder has, of a block of kBlockColumns columns, at most kBlockBytes long: load(block, n), a thread's 16 bytes of
// codes, those of kPiecePairs pairs of steps; decode(piece, group, pair, a), the operands of a pair's two steps,
// kFactor of which make the weight, if kGroups times scales(block, group) of rows r and r + 8. `block` is an address in
// shared memory.
class Codes {
 public:
  __device__ uint4 load(std::uint32_t block, int n) const {
    return ptx::load_shared_16(block + codes + n * sizeof(lowbit::FragmentCodes::words[0]));
  }

 private:
  const std::uint32_t codes = ptx::pinned(threadIdx.x % 128 * 16);
};

// This thread's first row in a block; the other one is 8 further on.
__device__ inline std::uint32_t row_in_block() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// Of rows r and r + 8, in a block whose scales lie behind its codes. row: row_in_block().
template <class Scale>
__device__ inline float2 group_scales(std::uint32_t block, std::uint32_t row, int group) {
  const std::uint32_t at = block + sizeof(lowbit::FragmentCodes) + (group * lowbit::kBlockRows + row) * sizeof(Scale);
  if constexpr (sizeof(Scale) == 4) {
    return make_float2(__uint_as_float(ptx::load_shared_4(at)), __uint_as_float(ptx::load_shared_4(at + 32)));
  } else {
    return make_float2(__half2float(__ushort_as_half(ptx::load_shared_2(at))),
                       __half2float(__ushort_as_half(ptx::load_shared_2(at + 16))));
  }
}

struct NoGroup {};

}  // namespace heddle::cuda::sm80::linear
