// First kernel: S = Q K^T with its options, one tile a block. Pairs without attention become -inf.
#pragma once

#include "cuda/any/attention_baseline/product.cuh"
#include "cuda/any/options.cuh"

namespace heddle::cuda::any::attention_baseline {

template <class T>
using Scores = Product<T, kKeys, false>;

template <class T>
struct ScoresMemory {
  typename Scores<T>::A q;
  typename Scores<T>::B k;
  Source q_row[kRows], k_row[kKeys];  // what is stored, not what it stands for: scales are for the products
  float q_scale[kRows], k_scale[kKeys];
  RowTile at;
};

template <class T>
__global__ void __launch_bounds__(kThreads, 2) scores_kernel(const __grid_constant__ Params params) {
  __shared__ __align__(16) std::byte memory[sizeof(ScoresMemory<T>)];
  auto& shared = *reinterpret_cast<ScoresMemory<T>*>(memory);
  const RowTile& at = shared.at;
  const AttentionProblem& p = params.problem;
  const std::int64_t rest = blockIdx.x / params.k_tiles, first_key = (blockIdx.x - rest * params.k_tiles) * kKeys;
  const std::int64_t unit = rest / params.q_tiles;
  if (threadIdx.x == 0) shared.at = row_tile(p, unit, rest - unit * params.q_tiles);
  __syncthreads();
  if (first_key >= at.end || first_key + kKeys <= at.begin) return;

  static_assert(kThreads == kRows + kKeys);
  if (const int r = static_cast<int>(threadIdx.x); r < kRows) {
    const std::int64_t i = at.first + r;
    const bool exists = i < at.s.sq;
    shared.q_row[r] = {exists ? p.q.at(at.b, at.s.q_begin + i, at.h) : nullptr, 1.0f};
    shared.q_scale[r] = exists ? p.q_scale.at(at.b, at.s.q_begin + i, at.h) : 1.0f;
  } else {
    const std::int64_t j = first_key + r - kRows;
    const bool exists = j < at.s.sk;
    const auto slot = exists ? p.key_slot(at.b, at.s, j) : AttentionProblem::Slot{0, 0};
    shared.k_row[r - kRows] = {exists ? p.k.at(slot.batch, slot.row, at.kv_head) : nullptr, 1.0f};
    shared.k_scale[r - kRows] = exists ? p.k_scale.at(slot.batch, slot.row, at.kv_head) : 1.0f;
  }
  Scores<T> scores;
  const int size = static_cast<int>(p.D);
#pragma unroll 1
  for (int from = 0; from < size; from += Scores<T>::kDepth) {
    __syncthreads();
    load_rows(shared.q, p.q, params.q_pieces, size, from, [&](int r) { return shared.q_row[r]; });
    load_rows(shared.k, p.k, params.k_pieces, size, from, [&](int r) { return shared.k_row[r]; });
    __syncthreads();
    scores.step(shared.q, shared.k);
  }

  scores.for_each_pair([&](int row, int column, float x, float y) {
    const std::int64_t i = at.first + row, j = first_key + column;
    if (i >= at.s.sq || j >= params.pitch) return;
    const auto keys = p.key_range(at.s, i);
    const float q_scale = shared.q_scale[row];
    const auto score = [&](int n, float product) {
      const std::int64_t key = j + n;
      if (key < keys.begin || key >= keys.end) return -INFINITY;
      return logit<T>(p, at.s, at.b, at.h, i, key, product * q_scale * shared.k_scale[column + n]);
    };
    *reinterpret_cast<float2*>(params.row(at.b, at.h, i) + j) = make_float2(score(0, x), score(1, y));
  });
}

}  // namespace heddle::cuda::any::attention_baseline
