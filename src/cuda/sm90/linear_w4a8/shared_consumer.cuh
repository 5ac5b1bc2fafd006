// A warpgroup: its rows of W, decoded by others, times all tokens of the tile. The tensor cores' sums keep few bits, so
// those of a unit's 128 columns are added to others in float32.
#pragma once

#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/linear_w4a8/decoder.cuh"

namespace heddle::cuda::sm90::linear_w4a8 {

template <class C>
class SharedConsumer {
 public:
  using Memory = DecodedMemory<C>;
  using Decoder = linear_w4a8::Decoder<C>;

  __device__ SharedConsumer(Memory& memory, int row_group, int /*column_group*/) : shared(memory), group(row_group) {}

  // The next `units`.
  __device__ __forceinline__ void multiply(int units, linear::Sums<C>& sums) {
#pragma unroll
    for (int r = 0; r < C::kRowBlocks; ++r) {
#pragma unroll
      for (int i = 0; i < C::kAccumulators; ++i) sums[r][i] = 0.0f;
    }
#pragma unroll 1
    for (; units > 0; --units) {
      ptx::barrier_wait(shared.ready[stage.index], stage.phase);
      ptx::barrier_wait(shared.decoded_ready[place.index], place.phase);
#pragma unroll
      for (int r = 0; r < C::kRowBlocks; ++r) {
        constexpr int kStepColumns = 32;
        const Swizzled128 weights(shared.decoded[place.index][group * C::kRowBlocks + r]);
        const Swizzled128 x(shared.x[stage.index][0]);
        float products[C::kAccumulators];
        wgmma_fence();
#pragma unroll
        for (int column = 0; column < C::kPanelColumns; column += kStepColumns) {
          Wgmma<__nv_fp8_e4m3, C::kTokens>::shared_shared(products, weights.at(column), x.at(column), column > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        if (r + 1 == C::kRowBlocks && ptx::elect_one()) {
          ptx::barrier_arrive(shared.free[stage.index]);
          ptx::barrier_arrive(shared.decoded_free[place.index]);
        }
        keep(products);
#pragma unroll
        for (int i = 0; i < C::kAccumulators; ++i) sums[r][i] += products[i];
      }
      stage.template next<C::kStages>();
      place.template next<C::kDecodedStages>();
    }
  }

 private:
  Memory& shared;
  const int group;
  linear::Position stage, place;
};

}  // namespace heddle::cuda::sm90::linear_w4a8
