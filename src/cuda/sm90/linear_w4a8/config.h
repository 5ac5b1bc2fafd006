// Tiles, stages and shared memory.
#pragma once

#include <cuda_fp8.h>

#include "cuda/common/device.h"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/sm90/linear/params.h"
#include "cuda/sm90/linear_w4a8/decode.cuh"
#include "cuda/sm90/linear_w4a8/variants.h"

namespace heddle::cuda::sm90::linear_w4a8 {

// T: of y. Block: of weights.
template <class T, class Block, Tiles kTiles>
struct Config {
  using Element = __nv_fp8_e4m3;
  using Output = T;
  using WeightBlock = Block;
  using Scales = GroupScales<Block>;
  static constexpr int kTokens = kTiles.tokens, kRowGroups = kTiles.row_groups, kRowBlocks = 1;
  static constexpr int kTileBlocks = kRowGroups * kRowBlocks, kUnitBlocks = 1;
  static constexpr int kPanelColumns = lowbit::kBlockColumns, kBlockPanels = 1;
  static constexpr bool kTokenScales = true;
  static constexpr int kDecoders = kTiles.decoders, kOthers = (1 + kDecoders + 3) / 4;  // warpgroups
  static constexpr int kColumnGroups = 1, kConsumers = kRowGroups, kThreads = 128 * (kOthers + kConsumers);
  static constexpr int kAccumulators = kTokens / 2;
  static constexpr float kFactor = Scales::kFactor;
  // Decoded weights on their way to the products.
  static constexpr int kDecodedStages = kDecoders == 0 ? 0 : 3;
  static constexpr int kDecodedBytes = kDecodedStages * kTileBlocks * lowbit::kBlockRows * kPanelColumns;
  static constexpr int kStageBytes = kTokens * kPanelColumns + kTileBlocks * static_cast<int>(sizeof(WeightBlock));
  static constexpr int kMost =
      (static_cast<int>(kHopperSharedBytes) - 2048 - kDecodedBytes - kRowGroups * 4 * 512) / kStageBytes;
  static constexpr int kStages = kMost < 8 ? kMost : 8;
  static constexpr int kOtherRegisters = kDecoders > 0 ? 48 : kRowGroups == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kDecoders > 0 ? 208 : kRowGroups == 2 ? 240 : 112;
};

template <class C>
struct SharedMemory {
  using T = typename C::Output;
  alignas(1024) std::uint8_t x[C::kStages][C::kUnitBlocks][C::kTokens][C::kPanelColumns];
  alignas(128) typename C::WeightBlock weights[C::kStages][C::kTileBlocks][C::kUnitBlocks];
  alignas(16) T staging[4 * C::kRowGroups][16][16];
  ptx::Barrier ready[C::kStages], free[C::kStages];
};

// With weights in e4m3, rows of 128 bytes with the 128-byte swizzle.
template <class C>
struct DecodedMemory : SharedMemory<C> {
  alignas(1024) std::uint8_t decoded[C::kDecodedStages][C::kTileBlocks][lowbit::kBlockRows][C::kPanelColumns];
  ptx::Barrier decoded_ready[C::kDecodedStages], decoded_free[C::kDecodedStages];
};

}  // namespace heddle::cuda::sm90::linear_w4a8
