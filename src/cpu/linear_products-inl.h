// x W^T over packed weights: with few rows of x each decoded vector is used from its register, with more a block of
// columns is decoded into the first-level cache and multiplied by the register tile of gemm-inl.h. Both add products
// column after column to one sum, so that their bits are the same.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/linear_codes-inl.h"
#include "cpu/linear_kernels.h"
#include "cpu/plan.h"
#include "cpu/unit-inl.h"
#include "lowbit/packed.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

constexpr std::int64_t kBlockColumns = 128;  // 24 KB of f32 weights for kLinearTile
constexpr int kTileVectors = static_cast<int>(kLinearPanels) * kSlices;
static_assert(kTileVectors % kTileN == 0);

// sums[m][kLanes * v] for `V` vectors of rows of W from `vector` of panel `first` on, and M rows of x.
template <int M, int V, class Codes, class Scales>
HWY_NOINLINE void DotRows(const Codes& given_codes, const Scales& given_scales, const lowbit::Panels& w,
                          const float* HWY_RESTRICT x, std::int64_t first, int vector, float* HWY_RESTRICT sums) {
  const DF d;
  const lowbit::PanelLayout& l = w.layout;
  const Codes codes = given_codes;
  const Scales scales = given_scales;
  const std::int64_t columns = l.columns;
  VF sum[M][V];
  HWY_UNROLL(8)
  for (int m = 0; m < M; ++m) {
    HWY_UNROLL(3)
    for (int v = 0; v < V; ++v) sum[m][v] = hn::Zero(d);
  }
  const SlicePlace place[3] = {{w, first, vector}, {w, first, vector + (V > 1 ? 1 : 0)}, {w, first, vector + V - 1}};
  std::int64_t k = 0;
  for (std::int64_t g = 0; k < columns; ++g) {
    VF scale[V], zero[V];
    HWY_UNROLL(3)
    for (int v = 0; v < V; ++v) {
      scale[v] = scales.Load(place[v].panel + l.scales, place[v].scale_index(g));
      zero[v] = place[v].template Zero<Codes>(l, g);
    }
    for (const std::int64_t end = std::min(columns, (g + 1) * l.group); k < end; k += lowbit::kPanelStep) {
      typename Codes::Word word[V];
      HWY_UNROLL(3)
      for (int v = 0; v < V; ++v) word[v] = codes.Load(place[v].step(l, k), place[v].slice);
      HWY_UNROLL(8)
      for (int j = 0; j < lowbit::kPanelStep; ++j) {
        VF weight[V];
        HWY_UNROLL(3)
        for (int v = 0; v < V; ++v) weight[v] = hn::Mul(codes.Value(word[v], zero[v]), scale[v]);
        HWY_UNROLL(8)
        for (int m = 0; m < M; ++m) {
          const VF factor = hn::Set(d, x[m * columns + k + j]);
          HWY_UNROLL(3)
          for (int v = 0; v < V; ++v) sum[m][v] = hn::MulAdd(factor, weight[v], sum[m][v]);
        }
      }
    }
  }
  HWY_UNROLL(8)
  for (int m = 0; m < M; ++m) {
    HWY_UNROLL(3)
    for (int v = 0; v < V; ++v) hn::StoreU(sum[m][v], d, sums + m * kLinearTile + v * kLanes);
  }
}

template <int M, class Codes, class Scales>
void DotTile(const Codes& codes, const Scales& scales, const lowbit::Panels& w, const float* x, std::int64_t first,
             int vectors, float* sums) {
  constexpr int V = M == 8 ? 1 : kRegisters == 32 || M <= 2 ? 3 : 2;
  int n = 0;
  for (; n + V <= vectors; n += V) DotRows<M, V>(codes, scales, w, x, first, n, sums + n * kLanes);
  for (; n < vectors; ++n) DotRows<M, 1>(codes, scales, w, x, first, n, sums + n * kLanes);
}

// Columns [begin, begin + depth) of `vectors` vectors of rows from panel `first` on, to block[k][row], words of
// neighbouring columns. begin and depth are multiples of kPanelStep.
template <Unit U, bool kExact, class Codes, class Scales>
HWY_NOINLINE void DecodeBlock(const Codes& given_codes, const Scales& given_scales, const lowbit::Panels& w,
                              std::int64_t first, int vectors, std::int64_t begin, std::int64_t depth,
                              typename U::Word* HWY_RESTRICT block) {
  constexpr int kColumns = sizeof(typename U::Word) / sizeof(typename U::Element);
  const lowbit::PanelLayout& l = w.layout;
  const Codes codes = given_codes;
  const Scales scales = given_scales;
  for (int n = 0; n < vectors; ++n) {
    const SlicePlace place(w, first, n);
    typename U::Word* to = block + n * kLanes;
    std::int64_t k = begin;
    for (std::int64_t g = begin / l.group; k < begin + depth; ++g) {
      const VF scale = scales.Load(place.panel + l.scales, place.scale_index(g));
      const VF zero = place.template Zero<Codes>(l, g);
      for (const std::int64_t end = std::min(begin + depth, (g + 1) * l.group); k < end; k += lowbit::kPanelStep) {
        auto word = codes.Load(place.step(l, k), place.slice);
        HWY_UNROLL(8)
        for (int j = 0; j < lowbit::kPanelStep; j += kColumns) {
          VF weights[kColumns];
          HWY_UNROLL(2)
          for (int i = 0; i < kColumns; ++i) weights[i] = hn::Mul(codes.Value(word, zero), scale);
          U::template PackWord<kExact>(weights, to);
          to += kLinearTile;
        }
      }
    }
  }
}

// sums[m][row] for rows of x in whole tiles; x: words [rows][stride].
template <Unit U, Sum kSum>
void MultiplyBlock(const typename U::Word* x, std::int64_t stride, std::int64_t rows, std::int64_t depth,
                   const typename U::Word* block, float* sums) {
  for (int n = 0; n < kTileVectors; n += kTileN) {
    for (std::int64_t m = 0; m < rows; m += U::kTileM) {
      U::template Product<kTileN, kSum>(depth, {x + m * stride, stride, 1}, {block + n * kLanes, kLinearTile},
                                        sums + m * kLinearTile + n * kLanes, kLinearTile);
    }
  }
}

// The whole product of one task, of `count` rows of x, which are there up to whole tiles.
template <Unit U, class Codes, class Scales>
void MultiplyTile(const Codes& codes, const Scales& scales, const lowbit::Panels& w, const typename U::Word* x,
                  std::int64_t count, std::int64_t first, int vectors, typename U::Word* block, float* sums) {
  const std::int64_t columns = w.layout.columns, rows = round_up(count, U::kTileM);
  if (vectors < kTileVectors) {
    std::memset(block, 0, static_cast<std::size_t>(Words<U>(kBlockColumns) * kLinearTile) * sizeof(*block));
  }
  for (std::int64_t k = 0; k < columns; k += kBlockColumns) {
    const std::int64_t depth = std::min(kBlockColumns, columns - k);
    DecodeBlock<U, Scales::kExact>(codes, scales, w, first, vectors, k, depth, block);
    const auto* from = x + Words<U>(k);
    if (k == 0) {
      MultiplyBlock<U, Sum::kStore>(from, Words<U>(columns), rows, Words<U>(depth), block, sums);
    } else {
      MultiplyBlock<U, Sum::kGoOn>(from, Words<U>(columns), rows, Words<U>(depth), block, sums);
    }
  }
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
