// A warpgroup: its rows of W times all tokens of the tile. The tensor cores' sums keep few bits, so those of a unit's
// 128 columns are added to others in float32.
#pragma once

#include "cuda/common/hand_over.cuh"
#include "cuda/common/ptx/shared.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/linear/producer.cuh"
#include "cuda/sm90/linear_w4a8/config.h"

namespace heddle::cuda::sm90::linear_w4a8 {

template <class C>
class Consumer {
 public:
  using Memory = SharedMemory<C>;
  using WeightBlock = typename C::WeightBlock;
  using Scales = typename C::Scales;

  __device__ Consumer(SharedMemory<C>& memory, int group, int /*column_group*/, int /*x_rows*/) : shared(memory) {
    const WeightBlock& first = memory.weights[0][group][0];
    const int thread = static_cast<int>(threadIdx.x % 128), row = thread / 32 * 16 + thread % 32 / 4;
    codes = ptx::shared_address(first.codes[0][thread]);
    scales = ptx::shared_address(Scales::at(first, row, thread));
  }

  // The next `units`, of which there is one at least.
  __device__ __forceinline__ void multiply(int units, linear::Sums<C>& sums) {
#pragma unroll
    for (int i = 0; i < C::kAccumulators; ++i) sums[0][i] = 0.0f;
    Operands first;
    await_weights();
    decode_half(stage.index, 0, first);
#pragma unroll 1
    for (; units >= kAtOnce; units -= kAtOnce) run<kAtOnce>(units > kAtOnce, first, sums[0]);
#pragma unroll 1
    for (; units > 0; --units) run<1>(units > 1, first, sums[0]);
  }

 private:
  static_assert(C::kRowBlocks == 1 && C::kUnitBlocks == 1);
  static constexpr int kStepColumns = 32, kHalfSteps = 2;
  static constexpr int kAtOnce = C::kConsumerRegisters > 200 ? 2 : 1;  // units
  using Operands = std::uint32_t[kHalfSteps][4];
  using Products = float[C::kAccumulators];

  __device__ void await_weights() {
    await_filled(shared.ready[stage.index], stage.phase);
    planted_release(Plant::late_key_reads, shared.free[stage.index]);
  }

  // Both halves' weights went into products that are done. What is loaded once more behind the last unit is not used.
  __device__ void release(int n) {
    if (!planted(Plant::late_key_reads)) release_after_products(shared.free[n]);
  }

  // Some units, the sums of each added while the products of the next one run. The assembler does not follow products
  // that are under way around a loop, so none are at the end. more: whether there are units behind these.
  template <int kUnits>
  __device__ __forceinline__ void run(bool more, Operands& first, Products& sums) {
    Operands second;
    Products products[2];
    int before = 0;  // stage
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      Products &now = products[u % 2], &done = products[(u + 1) % 2];
      issue(0, first, now);
      if (u > 0) {
        wgmma_wait<1>();
        release(before);
        keep(done);
      }
      decode_half(stage.index, 1, second);
      issue(1, second, now);
      if (u > 0) add(done, sums);
      wgmma_wait<1>();
      before = stage.index;
      stage.next();
      if (u + 1 < kUnits || more) await_weights();
      // Behind the last unit this one's once more, for nothing.
      decode_half(u + 1 < kUnits || more ? stage.index : before, 0, first);
    }
    wgmma_wait<0>();
    release(before);
    keep(products[(kUnits - 1) % 2]);
    add(products[(kUnits - 1) % 2], sums);
  }

  __device__ static void add(const Products& products, Products& sums) {
#pragma unroll
    for (int i = 0; i < C::kAccumulators; ++i) sums[i] += products[i];
  }

  __device__ void decode_half(int n, int half, Operands& operands) {
    const int at = n * static_cast<int>(sizeof(shared.weights[0]));
    const std::uint32_t low = ptx::load_shared_2(scales + at + half * Scales::kHalfBytes);
    const std::uint32_t high = ptx::load_shared_2(scales + at + half * Scales::kHalfBytes + 8 * Scales::kRowBytes);
    const uint4 q = ptx::load_shared_16(codes + at + half * static_cast<int>(sizeof(WeightBlock::codes[0])));
    widen(q.x, Scales::first(low), operands[0][0], operands[0][2]);
    widen(q.y, Scales::first(high), operands[0][1], operands[0][3]);
    widen(q.z, Scales::second(low), operands[1][0], operands[1][2]);
    widen(q.w, Scales::second(high), operands[1][1], operands[1][3]);
  }

  __device__ void issue(int half, const Operands& operands, Products& products) {
    const Swizzled128 x(shared.x[stage.index][0]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHalfSteps; ++i) {
      Wgmma<__nv_fp8_e4m3, C::kTokens>::registers_shared(products, operands[i],
                                                         x.at((half * kHalfSteps + i) * kStepColumns), half + i > 0);
    }
    wgmma_commit();
  }

  SharedMemory<C>& shared;
  std::uint32_t codes, scales;  // addresses of this thread's in the first stage
  RingPosition<C::kStages> stage;
};

}  // namespace heddle::cuda::sm90::linear_w4a8
