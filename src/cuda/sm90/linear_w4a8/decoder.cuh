// The warpgroup that decodes weights into shared memory, for all consumers. A weight is decoded once for each tile of
// tokens, and products whose operands both lie in shared memory are the faster ones.
#pragma once

#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/sm90/linear/producer.cuh"
#include "cuda/sm90/linear_w4a8/config.h"
#include "cuda/sm90/linear_w4a8/decode.cuh"

namespace heddle::cuda::sm90::linear_w4a8 {

template <class C>
class Decoder {
 public:
  static __device__ void init_barriers(DecodedMemory<C>& shared) {
    for (int i = 0; i < C::kDecodedStages; ++i) {
      ptx::barrier_init(shared.decoded_ready[i], 4);
      ptx::barrier_init(shared.decoded_free[i], 4 * C::kConsumers);
    }
  }

  __device__ explicit Decoder(DecodedMemory<C>& memory) : shared(memory), thread(threadIdx.x % 128) {
    const int lane = thread % 32, row = lane % 8;
    // Of the four matrices that a warp stores at a time lanes 0-7, 8-15... name the rows: the upper 8 of its 16 rows
    // and the lower 8, of one piece of 16 columns and of the next.
    row_bytes = (thread / 32 * 16 + lane / 8 % 2 * 8 + row) * C::kPanelColumns;
    piece = lane / 16 ^ row;
  }

  __device__ void run(const linear::Schedule& s) {
#pragma unroll 1
    for (int n = 0;; ++n) {
      const linear::Part part = linear::part_of<C>(s, n);
      if (part.begin == part.end) return;
#pragma unroll 1
      for (int unit = part.begin; unit < part.end; ++unit) decode_stage();
    }
  }

 private:
  __device__ void decode_stage() {
    ptx::barrier_wait(shared.ready[stage.index], stage.phase);
    ptx::barrier_wait(shared.decoded_free[place.index], place.phase ^ 1);
#pragma unroll
    for (int block = 0; block < C::kTileBlocks; ++block) {
      const lowbit::FragmentBlock8& weights = shared.weights[stage.index][block][0];
      const int row = thread / 32 * 16 + thread % 32 / 4;
      const auto low = *reinterpret_cast<const std::uint32_t*>(weights.exponents[row]);
      const auto high = *reinterpret_cast<const std::uint32_t*>(weights.exponents[row + 8]);
      const std::uint32_t to = ptx::shared_address(shared.decoded[place.index][block]) + row_bytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 codes = *reinterpret_cast<const uint4*>(weights.codes[half][thread]);
        store_step(codes.x, codes.y, low >> 16 * half & 0xFF, high >> 16 * half & 0xFF, to, 4 * half);
        store_step(codes.z, codes.w, low >> (16 * half + 8) & 0xFF, high >> (16 * half + 8) & 0xFF, to, 4 * half + 2);
      }
    }
    ptx::fence_async_shared();
    __syncwarp();
    if (ptx::elect_one()) ptx::barrier_arrive(shared.decoded_ready[place.index]);
    stage.template next<C::kStages>();
    place.template next<C::kDecodedStages>();
  }

  // 32 columns, pieces `first` and the next, of two rows.
  __device__ void store_step(std::uint32_t upper, std::uint32_t lower, std::uint32_t upper_exponent,
                             std::uint32_t lower_exponent, std::uint32_t to, int first) const {
    std::uint32_t r[4];
    widen(upper, Magnitudes(upper_exponent), r[0], r[2]);
    widen(lower, Magnitudes(lower_exponent), r[1], r[3]);
    ptx::store_matrix_x4(to + ((piece ^ first) * 16), r[0], r[1], r[2], r[3]);
  }

  DecodedMemory<C>& shared;
  const int thread;
  int row_bytes, piece;
  linear::Position stage, place;
};

}  // namespace heddle::cuda::sm90::linear_w4a8
