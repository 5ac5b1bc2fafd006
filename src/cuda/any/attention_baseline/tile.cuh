// Which tile a block works on, and rows of q, k and v on their way to shared memory.
#pragma once

#include "cuda/any/attention_baseline/params.h"
#include "cuda/any/bounded_piece.h"
#include "cuda/any/options.cuh"

namespace heddle::cuda::any::attention_baseline {

// One tile of query rows of one head. Keys that none of its rows attends by causality and window are in no product.
// It lies in shared memory, since the products need the registers.
struct RowTile {
  std::int64_t b, h, kv_head, first;
  Sequence s;
  std::int64_t begin, end;  // keys that some row attends
};

__device__ inline RowTile row_tile(const AttentionProblem& p, std::int64_t unit, std::int64_t q_tile) {
  RowTile at{};
  at.b = unit / p.H;
  at.h = unit - at.b * p.H;
  at.kv_head = at.h / p.G;
  at.first = q_tile * kRows;
  at.s = bounded_piece(p, at.b, true);  // the score buffer
  if (at.first < at.s.sq) {
    at.begin = p.key_range(at.s, at.first).begin;
    at.end = p.key_range(at.s, clamped(at.first + kRows, 0, at.s.sq) - 1).end;
  }
  return at;
}

// A [kRows, kColumns] tile whose rows start in different banks: eight of them, 16 bytes each, meet all.
template <class T, int kRows, int kColumns>
struct alignas(16) Tile {
  static constexpr int kPadding = 16 / sizeof(T);
  T row[kRows][kColumns + kPadding];
};

// Where a row of an operand starts (null: there is none, zeros), and what its f8e4m3 values are multiplied with. They
// lie in shared memory: looking up a page takes two divisions, and many threads share a row.
struct Source {
  const std::byte* row;
  float scale;
};

// Row r of the tile becomes columns `from` ... of source_at(r), which has `size` of them; zeros beyond.
template <class T, int kTileRows, int kColumns, class SourceAt>
__device__ void load_rows(Tile<T, kTileRows, kColumns>& tile, const Operand& x, bool pieces, int size, int from,
                          SourceAt source_at) {
  constexpr int kPiece = 16 / sizeof(T), kPerRow = kColumns / kPiece;
  constexpr int kPasses = kTileRows * kPerRow / kThreads;
  static_assert(kTileRows * kPerRow % kThreads == 0 && kThreads % kPerRow == 0);
  const int row = static_cast<int>(threadIdx.x) / kPerRow, column = static_cast<int>(threadIdx.x) % kPerRow * kPiece;
  if (pieces) {
    uint4 piece[kPasses];
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      const std::byte* source = source_at(row + n * (kThreads / kPerRow)).row;
      piece[n] = make_uint4(0, 0, 0, 0);
      if (source != nullptr && from + column < size) {
        piece[n] = *reinterpret_cast<const uint4*>(source + (from + column) * sizeof(T));
      }
    }
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      *reinterpret_cast<uint4*>(&tile.row[row + n * (kThreads / kPerRow)][column]) = piece[n];
    }
    return;
  }
#pragma unroll 1
  for (int n = 0; n < kPasses; ++n) {
    const Source source = source_at(row + n * (kThreads / kPerRow));
#pragma unroll 1
    for (int e = 0; e < kPiece; ++e) {
      const int d = from + column + e;
      tile.row[row + n * (kThreads / kPerRow)][column + e] =
          static_cast<T>(source.row != nullptr && d < size ? source.scale * element<T>(x, source.row, d) : 0.0f);
    }
  }
}

}  // namespace heddle::cuda::any::attention_baseline
