// Tiles, stages and shared memory.
#pragma once

#include <cuda_fp8.h>

#include "cuda/common/device.h"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/sm90/linear/params.h"

namespace heddle::cuda::sm90::linear_w4a8 {

// T: of y. kTokens_: rows of x, the N of the products; kRowGroups_: warpgroups of kRowBlocks_ times 64 rows of W, the
// M.
template <class T, int kTokens_, int kRowGroups_, int kRowBlocks_, int kUnitBlocks_>
struct Config {
  using Element = __nv_fp8_e4m3;
  using Output = T;
  using WeightBlock = lowbit::FragmentBlock8;
  static constexpr int kTokens = kTokens_, kRowGroups = kRowGroups_, kRowBlocks = kRowBlocks_;
  static constexpr int kTileBlocks = kRowGroups * kRowBlocks;
  static constexpr int kUnitBlocks = kUnitBlocks_;  // of columns whose products are summed in the tensor cores
  static constexpr int kPanelColumns = lowbit::kBlockColumns, kBlockPanels = 1;
  static constexpr bool kTokenScales = true;
  static constexpr int kColumnGroups = 1, kConsumers = kRowGroups, kThreads = 128 * (1 + kConsumers);
  static constexpr int kAccumulators = kTokens / 2;
  static constexpr float kFactor = 32;  // E4M3 holds weights times 2^-5
  static constexpr int kStageBytes =
      kUnitBlocks * (kTokens * kPanelColumns + kTileBlocks * static_cast<int>(sizeof(WeightBlock)));
  static constexpr int kMost = (static_cast<int>(kHopperSharedBytes) - 2048 - kRowGroups * 4 * 512) / kStageBytes;
  static constexpr int kStages = kMost < 8 ? kMost : 8;
  static constexpr int kProducerRegisters = kRowGroups == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kRowGroups == 2 ? 240 : kRowGroups == 3 ? 160 : 112;
};

template <class C>
struct SharedMemory {
  using T = typename C::Output;
  alignas(1024) std::uint8_t x[C::kStages][C::kUnitBlocks][C::kTokens][C::kPanelColumns];
  alignas(128) typename C::WeightBlock weights[C::kStages][C::kTileBlocks][C::kUnitBlocks];
  alignas(16) T staging[4 * C::kRowGroups][16][16];
  ptx::Barrier ready[C::kStages], free[C::kStages];
};

}  // namespace heddle::cuda::sm90::linear_w4a8
