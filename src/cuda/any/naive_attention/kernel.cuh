// Exact attention in four steps, each as plain as it can be said: what the tuned kernels compute, for reading and for
// comparing. One block takes one query row and walks over its keys, as many at a time as it has threads. No tile of q,
// no tensor core, f32 arithmetic; every option. examples/ladder climbs from here.
#pragma once

#include "cuda/any/bounded_piece.h"
#include "cuda/any/naive_attention/params.h"
#include "cuda/any/options.cuh"

namespace heddle::cuda::any::naive_attention {

constexpr int kThreads = 128;  // and keys in a block of keys
constexpr int kMaxSize = 256;
constexpr int kColumns = kMaxSize / kThreads;  // of o that a thread owns: threadIdx.x + n * kThreads

struct SharedMemory {
  float q[kMaxSize];  // what it stands for: scaled, if stored in 8 bits
  // One block of keys. score: -inf where the pair is removed. weight: the probability after dropout, of v's row;
  // nothing is read from the rows of pairs that were removed or dropped (null).
  float score[kThreads], probability[kThreads], weight[kThreads];
  const std::byte* v[kThreads];
};

// Softmax over some of a row's keys: o is not yet divided by the sum. The same in all threads, but for o.
struct Partial {
  float maximum = -INFINITY, sum = 0.0f, o[kColumns] = {};
};

// Where a block works.
struct Place {
  std::int64_t b, h, kv_head, i;
  Sequence s;
};

// 1. Scores of `count` keys from `first` on, a key a thread, and their maximum.
template <class T>
__device__ float compute_scores_and_maximum(const AttentionProblem& p, const Place& at, std::int64_t first, int count,
                                            SharedMemory& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < count) {
    const std::int64_t j = first + thread;
    const auto slot = p.key_slot(at.b, at.s, j);
    const std::byte* k = p.k.at(slot.batch, slot.row, at.kv_head);
    float product = 0.0f;
    for (int d = 0; d < p.D; ++d) product = fmaf(shared.q[d], element<T>(p.k, k, d), product);
    product *= p.k_scale.at(slot.batch, slot.row, at.kv_head);
    shared.score[thread] = logit<T>(p, at.s, at.b, at.h, at.i, j, product);
  }
  __syncthreads();
  float maximum = -INFINITY;
  for (int n = 0; n < count; ++n) maximum = fmaxf(maximum, shared.score[n]);
  return maximum;
}

// 2. Softmax over the block, and the values weighted with it.
template <class T>
__device__ Partial compute_softmax_and_weighted_values(const Params& params, const Place& at, std::int64_t first,
                                                       int count, float maximum, SharedMemory& shared) {
  const AttentionProblem& p = params.problem;
  const int thread = static_cast<int>(threadIdx.x);
  const float base = base_of(maximum);
  if (thread < count) {
    const std::int64_t j = first + thread;
    const float factor = dropout_factor(p, params.drop_below, at.s, at.b, at.h, at.i, j);
    const bool read = shared.score[thread] != -INFINITY && factor != 0.0f;
    shared.probability[thread] = expf(shared.score[thread] - base);
    const auto slot = p.key_slot(at.b, at.s, j);
    shared.weight[thread] = shared.probability[thread] * factor * p.v_scale.at(slot.batch, slot.row, at.kv_head);
    shared.v[thread] = read ? p.v.at(slot.batch, slot.row, at.kv_head) : nullptr;
  }
  __syncthreads();
  Partial block;
  block.maximum = maximum;
  for (int n = 0; n < count; ++n) {
    block.sum += shared.probability[n];
    if (shared.v[n] == nullptr) continue;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int d = thread + c * kThreads;
      if (d < p.Dv) block.o[c] = fmaf(shared.weight[n], element<T>(p.v, shared.v[n], d), block.o[c]);
    }
  }
  return block;
}

// 3. Both parts' sums and outputs relative to the larger maximum: the online softmax.
__device__ inline void merge_statistics(Partial& all, const Partial& block) {
  const float maximum = fmaxf(all.maximum, block.maximum), base = base_of(maximum);
  const float keep = expf(all.maximum - base), add = expf(block.maximum - base);
  all.maximum = maximum;
  all.sum = all.sum * keep + block.sum * add;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) all.o[c] = all.o[c] * keep + block.o[c] * add;
}

// 4. Division by the sum, in which a sink takes part. A row without keys is zero.
__device__ inline void normalise(const AttentionProblem& p, const Place& at, const Partial& all) {
  const float sink = at.i < at.s.sq ? sink_of(p, at.h) : -INFINITY;
  const float base = base_of(fmaxf(all.maximum, sink)), factor = expf(all.maximum - base);
  const float sum = all.sum * factor + expf(sink - base);
  std::byte* const o = p.o.at(at.b, at.s.q_begin + at.i, at.h);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int d = static_cast<int>(threadIdx.x) + c * kThreads;
    if (d < p.Dv) store_output(p.o, o, d, sum == 0.0f ? 0.0f : all.o[c] * factor / sum);
  }
  if (threadIdx.x == 0) store_lse(p, at.s, at.b, at.h, at.i, base, sum);
}

template <class T>
__global__ void __launch_bounds__(kThreads) naive_attention_kernel(const __grid_constant__ Params params) {
  __shared__ SharedMemory shared;
  const AttentionProblem& p = params.problem;
  const std::int64_t unit = blockIdx.x / p.Sq, b = unit / p.H;
  const std::int64_t h = unit - b * p.H;
  const Place at{b, h, h / p.G, blockIdx.x - unit * p.Sq, bounded_piece(p, b)};
  if (at.i >= at.s.q_rows) return;
  const std::byte* q = p.q.at(b, at.s.q_begin + at.i, h);
  const float scale = p.q_scale.at(b, at.s.q_begin + at.i, h);
  for (int d = static_cast<int>(threadIdx.x); d < p.D; d += kThreads) shared.q[d] = scale * element<T>(p.q, q, d);
  __syncthreads();

  Partial all;
  const auto keys = p.key_range(at.s, at.i);
  const std::int64_t end = at.i < at.s.sq ? keys.end : keys.begin;
  for (std::int64_t first = keys.begin; first < end; first += kThreads) {
    const int count = static_cast<int>(clamped(end - first, 0, kThreads));
    const float maximum = compute_scores_and_maximum<T>(p, at, first, count, shared);
    merge_statistics(all, compute_softmax_and_weighted_values<T>(params, at, first, count, maximum, shared));
    __syncthreads();  // the next block's scores take this one's place
  }
  normalise(p, at, all);
}

}  // namespace heddle::cuda::any::naive_attention
