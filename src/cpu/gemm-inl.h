// The one matrix product of the CPU kernels: C[m, n] (+)= sum_k A(m, k) * B[k, n], n in vector lanes, A broadcast.
//   forward   S^T[key, row] = K[key, d] Q^T[d, row]        O^T[d, row] += V[key, d] P^T[key, row]
// Rows of queries lie in the lanes, so softmax needs no operation across lanes and K and V are read as they lie.
#pragma once

#include <cstdint>

#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// Rows of the register tile, which has up to kTileN vectors. Of 32 registers it takes 24 for sums, 3 for the operand in
// lanes and 1 for a broadcast; of 16, 12, 3 and 1.
constexpr int kTileM = kRegisters == 32 ? 8 : 4;

// What becomes of the register tile. A sum that goes on has the same bits wherever it is cut. One that is summed from
// zero and joined is nearer the truth: a value meets the roundings of its own call and one for each other call, not one
// for every value before it.
enum class Sum {
  kStore,      // C = A B
  kStoreMax,   // C = A B, and running column maxima
  kGoOn,       // C = ((C + a b) + a b) + ...
  kJoin,       // C = C + A B
  kScaleJoin,  // C = C * scale[n] + A B
};

// Operands, in a unit's words. A(m, k) = at[m * row + k * step] is broadcast; B[k, lane] = at[k * row + lane].
template <class Word>
struct Broadcasts {
  const Word* at;
  std::int64_t row, step;
};
template <class Word>
struct Lanes {
  const Word* at;
  std::int64_t row;
};

// One kTileM x (N vectors) tile. Not inlined: a caller's live vectors would push the operands out of the registers
// (seen to cost 33 % of the product). a_row, a_step: distance of A(m+1, k) and A(m, k+1); b_row, c_row: of rows of B
// and C.
template <class U, int N, Sum kSum>
HWY_NOINLINE void TileProduct(std::int64_t depth, const typename U::Word* HWY_RESTRICT a, std::int64_t a_row,
                              std::int64_t a_step, const typename U::Word* HWY_RESTRICT b, std::int64_t b_row,
                              float* HWY_RESTRICT c, std::int64_t c_row, const VF* scale, VF* max) {
  const DF d;
  VF sum[kTileM][N];
  HWY_UNROLL(kTileM)
  for (int m = 0; m < kTileM; ++m) {
    HWY_UNROLL(kTileN)
    for (int n = 0; n < N; ++n) {
      sum[m][n] = kSum == Sum::kGoOn ? hn::LoadU(d, c + m * c_row + n * kLanes) : hn::Zero(d);
    }
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    decltype(U::Load(b)) row[N];
    HWY_UNROLL(kTileN)
    for (int n = 0; n < N; ++n) row[n] = U::Load(b + n * kLanes);
    HWY_UNROLL(kTileM)
    for (int m = 0; m < kTileM; ++m) {
      const auto x = U::Broadcast(a + m * a_row);
      HWY_UNROLL(kTileN)
      for (int n = 0; n < N; ++n) sum[m][n] = U::MulAdd(x, row[n], sum[m][n]);
    }
    a += a_step;
    b += b_row;
  }
  HWY_UNROLL(kTileM)
  for (int m = 0; m < kTileM; ++m) {
    HWY_UNROLL(kTileN)
    for (int n = 0; n < N; ++n) {
      float* to = c + m * c_row + n * kLanes;
      if constexpr (kSum == Sum::kJoin) sum[m][n] = hn::Add(hn::LoadU(d, to), sum[m][n]);
      if constexpr (kSum == Sum::kScaleJoin) sum[m][n] = hn::MulAdd(hn::LoadU(d, to), scale[n], sum[m][n]);
      hn::StoreU(sum[m][n], d, to);
      if constexpr (kSum == Sum::kStoreMax) max[n] = hn::Max(max[n], sum[m][n]);
    }
  }
}

// What the units have in common whose product is that register tile, with operands of elements E in words W.
template <class U, class E, class W>
struct RegisterTileUnit {
  using Element = E;
  using Word = W;
  // 24 sums, 3 operands and a broadcast are 28 registers of 32; 12 sums, 3 operands and a broadcast 16 of 16.
  static constexpr int kTileM = kRegisters == 32 ? 8 : 4;
  static constexpr int kDepth = sizeof(W) / sizeof(E);
  static constexpr int kPad = 8;

  template <int N, Sum kSum>
  static HWY_INLINE void Product(std::int64_t depth, Broadcasts<W> a, Lanes<W> b, float* c, std::int64_t c_row,
                                 const VF* scale = nullptr, VF* max = nullptr) {
    TileProduct<U, N, kSum>(depth, a.at, a.row, a.step, b.at, b.row, c, c_row, scale, max);
  }

  // Panels of kTileM columns: [column / kTileM][row / kDepth][column % kTileM], a word of kDepth rows. They stand this
  // many words apart: a multiple of the page size would put all of them in one cache set.
  static constexpr std::int64_t PanelStride(std::int64_t rows) { return rows / kDepth * kTileM + 16; }
  static constexpr std::int64_t PanelWords(std::int64_t columns, std::int64_t rows) {
    return columns / kTileM * PanelStride(rows);
  }
  // Columns [column, column + kTileM) as operand A, from a word on.
  static Broadcasts<W> Panel(const W* panels, std::int64_t rows, std::int64_t column, std::int64_t word) {
    return {panels + column / kTileM * PanelStride(rows) + word * kTileM, 1, kTileM};
  }
  static W& PanelWord(W* panels, std::int64_t rows, std::int64_t column, std::int64_t row) {
    return panels[column / kTileM * PanelStride(rows) + row / kDepth * kTileM + column % kTileM];
  }
};

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
