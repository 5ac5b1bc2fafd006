// Tiles, stages and shared memory.
#pragma once

#include <cuda_fp8.h>

#include "cuda/common/device.h"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/sm90/linear_w4a8/params.h"

namespace heddle::cuda::sm90::linear_w4a8 {

// T: of y. kTokens_: rows of x, the N of the products; kConsumers_: warpgroups of kRowBlocks_ times 64 rows of W, the
// M.
template <class T, int kTokens_, int kConsumers_, int kRowBlocks_>
struct Config {
  using Element = __nv_fp8_e4m3;
  using Output = T;
  static constexpr int kTokens = kTokens_, kConsumers = kConsumers_, kRowBlocks = kRowBlocks_;
  static constexpr bool kTokenScales = true;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kAccumulators = kTokens / 2;
  static constexpr float kFactor = 32;  // E4M3 holds weights times 2^-5
  static constexpr int kStageBytes =
      kTokens * kBlockColumns + kConsumers * kRowBlocks * static_cast<int>(sizeof(WeightBlock));
  static constexpr int kMost = (static_cast<int>(kHopperSharedBytes) - 2048 - kConsumers * 4 * 512) / kStageBytes;
  static constexpr int kStages = kMost < 8 ? kMost : 8;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 112;
};

template <class C>
struct SharedMemory {
  using T = typename C::Output;
  alignas(1024) std::uint8_t x[C::kStages][C::kTokens][kBlockColumns];
  alignas(128) WeightBlock weights[C::kStages][C::kConsumers * C::kRowBlocks];
  // A warp's 16 tokens and 16 rows on their way out.
  alignas(16) T staging[4 * C::kConsumers][16][16];
  ptx::Barrier ready[C::kStages], free[C::kStages];
};

}  // namespace heddle::cuda::sm90::linear_w4a8
