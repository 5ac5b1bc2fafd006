// Tiles, stages and shared memory.
#pragma once

#include "cuda/any/linear/e2m1.cuh"
#include "cuda/any/linear/exchange.h"
#include "cuda/common/device.h"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/sm90/linear/params.h"
#include "cuda/sm90/linear_w4a16/variants.h"

namespace heddle::cuda::sm90::linear_w4a16 {

using cuda::linear::Exchange, cuda::linear::kOperandFactor;

template <class T, Tiles kTiles>
struct Config {
  using Element = T;
  using Output = T;
  using WeightBlock = lowbit::FragmentBlock;
  static constexpr int kTokens = kTiles.tokens, kRowGroups = kTiles.row_groups, kColumnGroups = kTiles.column_groups;
  static constexpr bool kWarpgroups = kTiles.warpgroups;
  static constexpr int kRowBlocks = kTiles.row_blocks, kTileBlocks = kRowGroups * kRowBlocks,
                       kUnitBlocks = kColumnGroups;
  static constexpr int kPanelColumns = 64, kBlockPanels = lowbit::kBlockColumns / kPanelColumns;
  static constexpr bool kTokenScales = false;
  static constexpr int kDecoders = 0, kOthers = 1, kConsumers = kRowGroups * kColumnGroups;
  static constexpr int kThreads = 128 * (kOthers + kConsumers);
  static constexpr int kAccumulators = kTokens / 2;
  static constexpr float kFactor = 1.0f / (kOperandFactor<T> * WeightBlock::kScaleFactor);  // of the sums
  static constexpr int kXBytes = kColumnGroups * kTokens * lowbit::kBlockColumns * static_cast<int>(sizeof(T));
  static constexpr int kExchangeBytes = kRowGroups * (kColumnGroups - 1) * kRowBlocks * kAccumulators * 128 * 4;
  static constexpr int kStageBytes = kXBytes + kTileBlocks * kUnitBlocks * static_cast<int>(sizeof(WeightBlock));
  static constexpr int kMost =
      (static_cast<int>(kHopperSharedBytes) - 2048 - kExchangeBytes - kRowGroups * 4 * 512) / kStageBytes;
  static constexpr int kStages = kMost < 8 ? kMost : 8;
  static constexpr int kOtherRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : kConsumers == 3 ? 160 : 112;
};

template <class C>
struct SharedMemory {
  using T = typename C::Element;
  alignas(1024) T x[C::kStages][C::kUnitBlocks * C::kBlockPanels][C::kTokens][C::kPanelColumns];
  alignas(128) typename C::WeightBlock weights[C::kStages][C::kTileBlocks][C::kUnitBlocks];
  alignas(16) T staging[4 * C::kRowGroups][16][16];
  Exchange<C> exchange;
  ptx::Barrier ready[C::kStages], free[C::kStages];
};

}  // namespace heddle::cuda::sm90::linear_w4a16
