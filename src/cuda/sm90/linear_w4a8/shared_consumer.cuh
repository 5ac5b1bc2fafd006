// A warpgroup: 64 rows of W, decoded by others, times all tokens of the tile, 128 at a time. The tensor cores' sums
// keep few bits, so those of a unit's 128 columns are added to others in float32.
#pragma once

#include "cuda/common/hand_over.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/linear_w4a8/decoder.cuh"

namespace heddle::cuda::sm90::linear_w4a8 {

template <class C>
class SharedConsumer {
 public:
  using Memory = DecodedMemory<C>;
  using Decoder = linear_w4a8::Decoder<C>;

  __device__ SharedConsumer(Memory& memory, int row_group, int /*column_group*/, int /*x_rows*/)
      : shared(memory), group(row_group) {}

  // The next `units`.
  __device__ __forceinline__ void multiply(int units, linear::Sums<C>& sums) {
    constexpr int kStepColumns = 32;
#pragma unroll
    for (int i = 0; i < C::kAccumulators; ++i) sums[0][i] = 0.0f;
#pragma unroll 1
    for (; units > 0; --units) {
      await_filled(shared.ready[stage.index], stage.phase);
      ptx::barrier_wait(shared.decoded_ready[place.index], place.phase);
      const Swizzled128 weights(shared.decoded[place.index][group]);
#pragma unroll
      for (int token = 0; token < C::kTokens; token += kProductTokens) {
        const Swizzled128 x(shared.x[stage.index][0][token]);
        float products[kProductTokens / 2];
        wgmma_fence();
#pragma unroll
        for (int column = 0; column < C::kPanelColumns; column += kStepColumns) {
          Wgmma<__nv_fp8_e4m3, kProductTokens>::shared_shared(products, weights.at(column), x.at(column), column > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        if (token + kProductTokens == C::kTokens) {
          release_after_products(shared.free[stage.index]);  // weights: whoever has decoded them fenced its loads
          release_after_products(shared.decoded_free[place.index]);
        }
        keep(products);
#pragma unroll
        for (int i = 0; i < kProductTokens / 2; ++i) sums[0][token / 2 + i] += products[i];
      }
      stage.next();
      place.next();
    }
  }

 private:
  static constexpr int kProductTokens = 128;

  Memory& shared;
  const int group;
  RingPosition<C::kStages> stage;
  RingPosition<C::kDecodedStages> place;
};

}  // namespace heddle::cuda::sm90::linear_w4a8
