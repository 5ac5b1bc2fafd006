// Tiles, stages and shared memory.
#pragma once

#include "cuda/common/device.h"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/sm90/linear_w4a16/decode.cuh"
#include "cuda/sm90/linear_w4a16/params.h"

namespace heddle::cuda::sm90::linear_w4a16 {

constexpr int kPanel = 64;  // columns of x in a row of the 128-byte swizzle

// kTokens_: rows of x, the N of the products; kConsumers_: warpgroups of 64 rows of W, the M.
template <class T, int kTokens_, int kConsumers_>
struct Config {
  using Element = T;
  using Output = T;
  static constexpr int kTokens = kTokens_, kConsumers = kConsumers_, kRowBlocks = 1;
  static constexpr bool kTokenScales = false;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kAccumulators = kTokens / 2;
  static constexpr float kFactor = 1.0f / (kOperandFactor<T> * WeightBlock::kScaleFactor);  // of the sums
  static constexpr int kStageBytes = kTokens * kBlockColumns * static_cast<int>(sizeof(T)) +
                                     kConsumers * kRowBlocks * static_cast<int>(sizeof(WeightBlock));
  static constexpr int kMost = (static_cast<int>(kHopperSharedBytes) - 2048 - kConsumers * 4 * 512) / kStageBytes;
  static constexpr int kStages = kMost < 8 ? kMost : 8;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : kConsumers == 3 ? 160 : 112;
};

struct Position {
  int index = 0;
  std::uint32_t phase = 0;
  template <int kStages>
  __device__ void next() {
    if (++index == kStages) index = 0, phase ^= 1;
  }
};

template <class C>
struct SharedMemory {
  using T = typename C::Element;
  alignas(1024) T x[C::kStages][kBlockColumns / kPanel][C::kTokens][kPanel];
  alignas(128) WeightBlock weights[C::kStages][C::kConsumers * C::kRowBlocks];
  // A warp's 16 tokens and 16 rows on their way out.
  alignas(16) T staging[4 * C::kConsumers][16][16];
  ptx::Barrier ready[C::kStages], free[C::kStages];
};

}  // namespace heddle::cuda::sm90::linear_w4a16
