// Tiles, stages and shared memory.
#pragma once

#include "cuda/any/linear/exchange.h"
#include "cuda/sm80/linear/variants.h"

namespace heddle::cuda::sm80::linear {

using cuda::linear::Exchange;

// D: what decodes the weights.
template <class D, Tiles kTiles>
struct Config {
  using Decoder = D;
  using Element = typename D::Element;
  using Output = Element;
  static constexpr int kTokens = kTiles.tokens, kRowGroups = kTiles.row_groups, kColumnGroups = kTiles.column_groups;
  static constexpr int kRowBlocks = kTiles.row_blocks, kTileBlocks = kRowGroups * kRowBlocks,
                       kUnitBlocks = kColumnGroups;
  static constexpr int kSharers = 128 * kRowGroups;  // threads that share x
  static constexpr int kThreads = kSharers * kColumnGroups;
  static constexpr int kAccumulators = kTokens / 2;
  static constexpr bool kTokenScales = false, kOneEpilogue = true;
  static constexpr float kFactor = D::kFactor;
  static constexpr int kConsumerRegisters = 65536 / kThreads;
  static constexpr int kPanelColumns = 64, kPanels = D::kBlockColumns / kPanelColumns;
  static constexpr int kPanelBytes = kTokens * kPanelColumns * 2;
};

// In front of the stages, of which there are as many as the GPU has room for; a decoder's table is behind them.
template <class C>
struct alignas(128) SharedMemory {
  using T = typename C::Element;
  alignas(16) T staging[4 * C::kRowGroups][16][16];
  Exchange<C> exchange;
};

// x as panels of 64 columns: of a token's eight pieces of 16 bytes, piece i is where i ^ (token % 8) says.
template <class C>
struct alignas(128) Stage {
  std::byte x[C::kColumnGroups][C::kPanels][C::kPanelBytes];
  std::byte weights[C::kTileBlocks][C::kColumnGroups][C::Decoder::kBlockBytes];
};

}  // namespace heddle::cuda::sm80::linear
