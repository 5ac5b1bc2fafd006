// What a warp does with a block of columns: its 16 rows of each of its blocks of weights times the tile's tokens.
#pragma once

#include <type_traits>

#include "cuda/any/linear/schedule.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/shared.cuh"
#include "cuda/sm80/linear/config.h"

namespace heddle::cuda::sm80::linear {

template <class C>
class Consumer {
  using D = typename C::Decoder;
  using T = typename C::Element;
  static constexpr int kTiles = C::kTokens / 16;  // of 8 tokens, in half of them

 public:
  // table: the decoder's memory.
  __device__ Consumer(const Params& params, std::uint32_t table, int row_group, int column_group)
      : p(params),
        decoder(params, table),
        each(p.group_shift == 0),
        every_other(p.group_shift <= 1),
        plain(p.group_shift == 2 && p.zeros == 0) {
    const std::uint32_t lane = threadIdx.x % 32, token = lane % 8;
    weights =
        offsetof(Stage<C>, weights) + (row_group * C::kRowBlocks * C::kColumnGroups + column_group) * D::kBlockBytes;
    // Lanes 8 i to 8 i + 7 name the rows of matrix i, 8 tokens by 8 columns: of a pair of steps piece i in the first
    // half of a panel, and the one with a bit changed in the other.
    x = ptx::pinned(column_group * (C::kPanels * C::kPanelBytes) + token * 128 + ((lane / 8) ^ token) * 16);
  }

  // upper: whether there are tokens in the tile's second half. copy() is called once, while loads or products are under
  // way.
  template <class Copy>
  __device__ __forceinline__ void multiply(std::uint32_t stage, bool upper, Sums<C>& sums, Copy copy) const {
    if constexpr (kFew) {  // code of its own for each kind of block: what is decided on the way would cost as much
      const auto of = [&](auto known_upper) {
        if (!D::kGroups || plain) {
          multiply_block(stage, known_upper, std::true_type{}, sums, copy);
        } else {
          multiply_block(stage, known_upper, std::false_type{}, sums, copy);
        }
      };
      upper ? of(std::true_type{}) : of(std::false_type{});
    } else {
      multiply_block(stage, upper, std::false_type{}, sums, copy);
    }
  }

  // After the last block.
  __device__ __forceinline__ static void join_chains(bool upper, Sums<C>& sums) {
    if constexpr (kFew) {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) sums[0][i] += upper ? 0.0f : sums[0][kHalf + i];
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
  static constexpr bool kFew = C::kTokens <= 16;
  static constexpr int kHalf = C::kAccumulators / 2;
  // Where few tokens leave the second half's sums free, those are of every second step: products wait for one another
  // half as often.
  template <class Upper>
  static constexpr bool kTwoChains = kFew&& std::is_same_v<Upper, std::false_type>;

  // Of half a block: codes, and of pairs of steps each 8 tokens' halves of both steps' columns. Large tiles have x one
  // pair at a time.
  using Tokens = std::uint32_t[2][kTiles][4];
  struct Operands {
    typename D::Piece pieces[C::kRowBlocks];
    Tokens x[kFew ? D::kPiecePairs : 1];
  };

  // Of a group of columns, this warp's rows.
  struct Groups {
    typename D::Group of[C::kRowBlocks];
    float2 scales[C::kRowBlocks];
  };

  // Plain: scales are of a whole block and there are no zero points.
  template <class Upper, class Plain, class Copy>
  __device__ __forceinline__ void multiply_block(std::uint32_t stage, Upper upper, Plain, Sums<C>& sums,
                                                 Copy copy) const {
    Sums<C> of_group;  // unused where sums have no groups
    clear(of_group);
    Groups groups;
    if constexpr (kFew) {  // all that the block takes is asked for at once
      Operands operands[2];
      load(stage, 0, upper, operands[0]);
      load(stage, 1, upper, operands[1]);
      begin_group<Plain>(stage, 0, groups);
      copy();
      multiply_half<Plain>(stage, 0, upper, operands[0], groups, of_group, sums);
      multiply_half<Plain>(stage, 1, upper, operands[1], groups, of_group, sums);
    } else {
      begin_group<Plain>(stage, 0, groups);
#pragma unroll 1
      for (int n = 0; n < 2; ++n) {
        Operands operands;
        load(stage, n, upper, operands);
        multiply_half<Plain>(stage, n, upper, operands, groups, of_group, sums);
        if (n == 0) copy();
      }
    }
  }

  template <class Upper>
  __device__ __forceinline__ void load(std::uint32_t stage, int n, Upper upper, Operands& to) const {
#pragma unroll
    for (int r = 0; r < C::kRowBlocks; ++r) to.pieces[r] = decoder.load(block_at(stage, r), n);
    if constexpr (kFew) {
#pragma unroll
      for (int i = 0; i < D::kPiecePairs; ++i) load_x(stage, n * D::kPiecePairs + i, upper, to.x[i]);
    }
  }
  template <class Upper>
  __device__ __forceinline__ void load_x(std::uint32_t stage, int pair, Upper upper, Tokens& to) const {
    const std::uint32_t from = ((stage + x) ^ pair % 2 * 64) + pair / 2 * C::kPanelBytes;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) ptx::load_matrix_x4(to[0][j], from + j * 1024);
    if (upper) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) ptx::load_matrix_x4(to[1][j], from + (kTiles + j) * 1024);
    }
  }

  template <class Plain, class Upper>
  __device__ __forceinline__ void multiply_half(std::uint32_t stage, int n, Upper upper, Operands& operands,
                                                Groups& groups, Sums<C>& of_group, Sums<C>& sums) const {
    Sums<C>& to = D::kGroups ? of_group : sums;
#pragma unroll
    for (int i = 0; i < D::kPiecePairs; ++i) {
      const int pair = n * D::kPiecePairs + i;
      Tokens& b = operands.x[kFew ? i : 0];
      if constexpr (!kFew) load_x(stage, pair, upper, b);
      if (!Plain::value && pair > 0 && p.zeros != 0 && begins_group(pair)) begin_group<Plain>(stage, pair, groups);
      std::uint32_t a[C::kRowBlocks][2][4];
#pragma unroll
      for (int r = 0; r < C::kRowBlocks; ++r) decoder.decode(operands.pieces[r], groups.of[r], i, a[r]);
      add_products<kTwoChains<Upper>>(a, b[0], 0, to);
      if (upper) add_products<false>(a, b[1], kTiles, to);
      if constexpr (D::kGroups) {
        if (Plain::value ? pair == 3 : begins_group(pair + 1)) {
          if constexpr (!Plain::value) read_scales(stage, pair, groups);
          add_group<kTwoChains<Upper>>(groups, of_group, sums);
          clear(of_group);
        }
      }
    }
  }

  // pair: the first of the group.
  template <class Plain>
  __device__ __forceinline__ void begin_group(std::uint32_t stage, int pair, Groups& groups) const {
    if constexpr (D::kGroups) {
#pragma unroll
      for (int r = 0; r < C::kRowBlocks; ++r) {
        groups.of[r] = Plain::value ? decoder.plain_group() : decoder.group(block_at(stage, r), pair >> p.group_shift);
      }
      if (Plain::value) read_scales(stage, 0, groups);
    }
  }
  __device__ __forceinline__ void read_scales(std::uint32_t stage, int pair, Groups& groups) const {
#pragma unroll
    for (int r = 0; r < C::kRowBlocks; ++r) {
      groups.scales[r] = decoder.scales(block_at(stage, r), pair >> p.group_shift);
    }
  }

  // Whether a pair of steps, 4 for the next block's first, is the first of a group.
  __device__ bool begins_group(int pair) const { return pair % 2 != 0 ? each : pair % 4 == 0 || every_other; }

  __device__ std::uint32_t block_at(std::uint32_t stage, int r) const {
    return stage + weights + r * (C::kColumnGroups * D::kBlockBytes);
  }

  // Steps after each other, so that products that wait for one another are far apart.
  template <bool kChains>
  __device__ __forceinline__ static void add_products(const std::uint32_t (&a)[C::kRowBlocks][2][4],
                                                      const std::uint32_t (&b)[kTiles][4], int first, Sums<C>& to) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int r = 0; r < C::kRowBlocks; ++r) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          const int tile = first + j + (kChains ? step * kTiles : 0);
          ptx::mma_16816<T>(reinterpret_cast<float(&)[4]>(to[r][4 * tile]), a[r][step], b[j][2 * step],
                            b[j][2 * step + 1]);
        }
      }
    }
  }

  template <bool kChains>
  __device__ __forceinline__ static void add_group(const Groups& groups, const Sums<C>& of_group, Sums<C>& sums) {
#pragma unroll
    for (int r = 0; r < C::kRowBlocks; ++r) {
#pragma unroll
      for (int i = 0; i < (kChains ? kHalf : C::kAccumulators); ++i) {
        const float x = kChains ? of_group[r][i] + of_group[r][kHalf + i] : of_group[r][i];
        sums[r][i] = fmaf(x, i % 4 < 2 ? groups.scales[r].x : groups.scales[r].y, sums[r][i]);
      }
    }
  }

  const Params& p;
  const D decoder;
  const bool each, every_other;  // pairs of steps that are a group's first
  const bool plain;              // scales are of whole blocks, and there are no zero points
  std::uint32_t weights, x;      // offsets in a stage
};

}  // namespace heddle::cuda::sm80::linear
