// Third kernel: O = P V, one tile of rows and columns a block.
#pragma once

#include "cuda/any/attention_baseline/product.cuh"

namespace heddle::cuda::any::attention_baseline {

template <class T, int kColumns>
using Output = Product<T, kColumns, true>;

// Which of kDepth keys have a probability that is not zero in some row: a bit each, for the rows of each warp.
template <int kDepth>
struct Attended {
  std::uint32_t bits[kThreads / 32][kDepth / 32];
  __device__ bool any(int key) const {
    std::uint32_t all = 0;
#pragma unroll
    for (int warp = 0; warp < kThreads / 32; ++warp) all |= bits[warp][key / 32];
    return (all >> key % 32 & 1) != 0;
  }
};

// P of kDepth keys, rounded to T, to shared memory.
template <class T, int kDepth>
__device__ void load_probabilities(const Params& params, const RowTile& at, std::int64_t first_key,
                                   Tile<T, kRows, kDepth>& tile, Attended<kDepth>& attended) {
  constexpr int kQuads = kDepth / 4, kPass = kThreads / kQuads;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int row = thread / kQuads, column = thread % kQuads * 4;
  const std::int64_t j = first_key + column;
  const float* source = params.row(at.b, at.h, at.first + row) + j;
  const int rows = j < at.end ? static_cast<int>(clamped(at.s.sq - at.first, 0, kRows)) - row : 0;
  std::uint32_t bits = 0;
  constexpr int kBatch = 4;  // loads on their way together
#pragma unroll
  for (int first = 0; first < kRows / kPass; first += kBatch) {
    float4 quad[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n, source += kPass * params.pitch) {
      quad[n] = make_float4(0, 0, 0, 0);
      if ((first + n) * kPass < rows) quad[n] = *reinterpret_cast<const float4*>(source);
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      // Beyond its own keys a row still has -inf.
      float x[4] = {quad[n].x, quad[n].y, quad[n].z, quad[n].w};
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (x[c] == -INFINITY) x[c] = 0.0f;
        if (x[c] != 0.0f) bits |= 1u << c;
        tile.row[row + (first + n) * kPass][column + c] = static_cast<T>(x[c]);
      }
    }
  }
  bits <<= column % 32;
#pragma unroll
  for (int word = 0; word < kDepth / 32; ++word) {
    const std::uint32_t any = __reduce_or_sync(0xffffffff, column / 32 == word ? bits : 0);
    if (lane == 0) attended.bits[thread / 32][word] = any;
  }
}

template <class T, int kColumns>
struct OutputMemory {
  static constexpr int kDepth = Output<T, kColumns>::kDepth;
  typename Output<T, kColumns>::A p;
  typename Output<T, kColumns>::B v;
  Source v_row[kDepth];
  Attended<kDepth> attended;
  RowTile at;
};

template <class T, int kColumns>
__global__ void __launch_bounds__(kThreads, 2) output_kernel(const __grid_constant__ Params params) {
  constexpr int kDepth = Output<T, kColumns>::kDepth;
  __shared__ __align__(16) std::byte memory[sizeof(OutputMemory<T, kColumns>)];
  auto& shared = *reinterpret_cast<OutputMemory<T, kColumns>*>(memory);
  const RowTile& at = shared.at;
  const AttentionProblem& p = params.problem;
  const int size = static_cast<int>(p.Dv), column_tiles = (size + kColumns - 1) / kColumns;
  const std::int64_t rest = blockIdx.x / column_tiles, unit = rest / params.q_tiles;
  const int first_column = static_cast<int>(blockIdx.x - rest * column_tiles) * kColumns;
  if (threadIdx.x == 0) shared.at = row_tile(p, unit, rest - unit * params.q_tiles);
  __syncthreads();
  if (at.first >= at.s.q_rows) return;

  Output<T, kColumns> output;
#pragma unroll 1
  for (std::int64_t first_key = at.begin / kDepth * kDepth; first_key < at.end; first_key += kDepth) {
    __syncthreads();
    if (const int r = static_cast<int>(threadIdx.x); r < kDepth) {
      const std::int64_t j = first_key + r;
      const bool exists = j < at.s.sk;
      const auto slot = exists ? p.key_slot(at.b, at.s, j) : AttentionProblem::Slot{0, 0};
      shared.v_row[r] =
          exists ? Source{p.v.at(slot.batch, slot.row, at.kv_head), p.v_scale.at(slot.batch, slot.row, at.kv_head)}
                 : Source{nullptr, 1.0f};
    }
    load_probabilities(params, at, first_key, shared.p, shared.attended);
    __syncthreads();
    // Values that no row attends may be anything, and zero times NaN is not zero.
    load_rows(shared.v, p.v, params.v_pieces, size, first_column, [&](int r) {
      return shared.attended.any(r) ? shared.v_row[r] : Source{nullptr, 1.0f};
    });
    __syncthreads();
    output.step(shared.p, shared.v);
  }

  output.for_each_pair([&](int row, int column, float x, float y) {
    const std::int64_t i = at.first + row, d = first_column + column;
    if (i >= at.s.q_rows) return;
    std::byte* const o = p.o.at(at.b, at.s.q_begin + i, at.h);
    const bool used = i < at.s.sq;
    if (d < size) store_output(p.o, o, d, used ? x : 0.0f);
    if (d + 1 < size) store_output(p.o, o, d + 1, used ? y : 0.0f);
  });
}

}  // namespace heddle::cuda::any::attention_baseline
