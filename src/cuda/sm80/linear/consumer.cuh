// What a warp does with a block of columns: its 16 rows of each of its blocks of weights times the tile's tokens.
#pragma once

#include "cuda/any/linear/schedule.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/shared.cuh"
#include "cuda/sm80/linear/config.h"

namespace heddle::cuda::sm80::linear {

using cuda::linear::Sums;

template <class C>
class Consumer {
  using D = typename C::Decoder;
  using T = typename C::Element;
  static constexpr int kTiles = C::kTokens / 16;  // of 8 tokens, in half of them

 public:
  // table: the decoder's memory.
  __device__ Consumer(const Params& params, std::uint32_t table, int row_group, int column_group)
      : p(params), decoder(params, table), each(p.group_shift == 0), every_other(p.group_shift <= 1) {
    const std::uint32_t lane = threadIdx.x % 32, token = lane % 8;
    weights =
        offsetof(Stage<C>, weights) + (row_group * C::kRowBlocks * C::kColumnGroups + column_group) * D::kBlockBytes;
    // Lanes 8 i to 8 i + 7 name the rows of matrix i, 8 tokens by 8 columns: of a pair of steps piece i in the first
    // half of a panel, and the one with a bit changed in the other.
    x = ptx::pinned(column_group * (C::kPanels * C::kPanelBytes) + token * 128 + ((lane / 8) ^ token) * 16);
  }

  // upper: whether there are tokens in the tile's second half.
  __device__ __forceinline__ void multiply(std::uint32_t stage, bool upper, Sums<C>& sums) {
    Sums<C> of_group;  // unused where sums have no groups
    clear(of_group);
    typename D::Group groups[C::kRowBlocks];
    if constexpr (C::kTokens <= 16) {  // all that a block takes is asked for at once
      Operands operands[2];
      load(stage, 0, upper, operands[0]);
      load(stage, 1, upper, operands[1]);
      multiply(stage, 0, upper, operands[0], groups, of_group, sums);
      multiply(stage, 1, upper, operands[1], groups, of_group, sums);
    } else {
#pragma unroll 1
      for (int n = 0; n < 2; ++n) {
        Operands operands;
        load(stage, n, upper, operands);
        multiply(stage, n, upper, operands, groups, of_group, sums);
      }
    }
  }

  __device__ __forceinline__ static void clear(Sums<C>& sums) {
#pragma unroll
    for (int r = 0; r < C::kRowBlocks; ++r) {
#pragma unroll
      for (int i = 0; i < C::kAccumulators; ++i) sums[r][i] = 0.0f;
    }
  }

 private:
  // Of half a block: codes, and of pairs of steps each 8 tokens' halves of both steps' columns. Large tiles have x one
  // pair at a time.
  static constexpr bool kAhead = C::kTokens <= 16;
  using Tokens = std::uint32_t[2][kTiles][4];
  struct Operands {
    typename D::Piece pieces[C::kRowBlocks];
    Tokens x[kAhead ? D::kPiecePairs : 1];
  };

  __device__ __forceinline__ void load(std::uint32_t stage, int n, bool upper, Operands& to) const {
#pragma unroll
    for (int r = 0; r < C::kRowBlocks; ++r) to.pieces[r] = decoder.load(block_at(stage, r), n);
    if constexpr (kAhead) {
#pragma unroll
      for (int i = 0; i < D::kPiecePairs; ++i) load(stage, n * D::kPiecePairs + i, upper, to.x[i]);
    }
  }
  __device__ __forceinline__ void load(std::uint32_t stage, int pair, bool upper, Tokens& to) const {
    const std::uint32_t from = ((stage + x) ^ pair % 2 * 64) + pair / 2 * C::kPanelBytes;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) ptx::load_matrix_x4(to[0][j], from + j * 1024);
    if (upper) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) ptx::load_matrix_x4(to[1][j], from + (kTiles + j) * 1024);
    }
  }

  __device__ __forceinline__ void multiply(std::uint32_t stage, int n, bool upper, Operands& operands,
                                           typename D::Group (&groups)[C::kRowBlocks], Sums<C>& of_group,
                                           Sums<C>& sums) const {
#pragma unroll
    for (int i = 0; i < D::kPiecePairs; ++i) {
      const int pair = n * D::kPiecePairs + i;
      Tokens& b = operands.x[kAhead ? i : 0];
      if constexpr (!kAhead) load(stage, pair, upper, b);
      std::uint32_t a[C::kRowBlocks][2][4];
#pragma unroll
      for (int r = 0; r < C::kRowBlocks; ++r) {
        if constexpr (D::kGroups) {
          if (pair == 0 || (p.zeros != 0 && begins_group(pair))) {
            groups[r] = decoder.group(block_at(stage, r), pair >> p.group_shift);
          }
        }
        decoder.decode(operands.pieces[r], groups[r], i, a[r]);
      }
      add_products(a, b[0], 0, D::kGroups ? of_group : sums);
      if (upper) add_products(a, b[1], kTiles, D::kGroups ? of_group : sums);
      if constexpr (D::kGroups) {
        if (begins_group(pair + 1)) {
          add_group(stage, pair >> p.group_shift, of_group, sums);
          clear(of_group);
        }
      }
    }
  }

  // Whether a pair of steps, 4 for the next block's first, is the first of a group.
  __device__ bool begins_group(int pair) const { return pair % 2 != 0 ? each : pair % 4 == 0 || every_other; }

  __device__ std::uint32_t block_at(std::uint32_t stage, int r) const {
    return stage + weights + r * (C::kColumnGroups * D::kBlockBytes);
  }

  // Steps after each other, so that products that wait for one another are far apart.
  __device__ __forceinline__ static void add_products(const std::uint32_t (&a)[C::kRowBlocks][2][4],
                                                      const std::uint32_t (&b)[kTiles][4], int first, Sums<C>& to) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int r = 0; r < C::kRowBlocks; ++r) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          ptx::mma_16816<T>(reinterpret_cast<float(&)[4]>(to[r][4 * (first + j)]), a[r][step], b[j][2 * step],
                            b[j][2 * step + 1]);
        }
      }
    }
  }

  __device__ __forceinline__ void add_group(std::uint32_t stage, int group, const Sums<C>& of_group,
                                            Sums<C>& sums) const {
#pragma unroll
    for (int r = 0; r < C::kRowBlocks; ++r) {
      const float2 scales = decoder.scales(block_at(stage, r), group);
#pragma unroll
      for (int i = 0; i < C::kAccumulators; ++i) {
        sums[r][i] = fmaf(of_group[r][i], i % 4 < 2 ? scales.x : scales.y, sums[r][i]);
      }
    }
  }

  const Params& p;
  const D decoder;
  const bool each, every_other;  // pairs of steps that are a group's first
  std::uint32_t weights, x;      // offsets in a stage
};

}  // namespace heddle::cuda::sm80::linear
