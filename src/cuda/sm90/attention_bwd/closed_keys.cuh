// Keys and values that a bias or mask keeps from every row: their probabilities are zero, but zero times NaN is not.
#pragma once

#include "cuda/common/ptx/barrier.cuh"
#include "cuda/sm90/attention/finite.cuh"
#include "cuda/sm90/attention_bwd/producer.cuh"
#include "cuda/sm90/attention_bwd/score_options.cuh"

namespace heddle::cuda::sm90::attention_bwd {

__device__ inline void consumers_meet() { ptx::barrier_sync<1, 128 * kConsumers>(); }

// Whether some query row attends the key, by band, bias and mask: this thread's share of the rows.
template <class C>
__device__ bool some_row_attends(const Params& p, const Work& w, int key, int thread, int threads) {
  const AttentionBackwardProblem& problem = p.problem;
#pragma unroll 1
  for (int h = w.head; h < w.head + w.heads; ++h) {
#pragma unroll 1
    for (int i = thread; i < w.sq; i += threads) {
      if (key < i + w.off - p.left || key > i + w.off + p.right) continue;
      bool open = true;
      if (problem.bias.data != nullptr) {
        open = problem.bias.dtype == DType::f32
                   ? PlaneElements<float>(problem.bias, w, h, i, key).at(0, 0) != -INFINITY
                   : static_cast<float>(PlaneElements<typename C::Element>(problem.bias, w, h, i, key).at(0, 0)) !=
                         -INFINITY;
      }
      if (problem.mask.data != nullptr) {
        open = open && PlaneElements<std::uint8_t>(problem.mask, w, h, i, key).at(0, 0) != 0;
      }
      if (open) return true;
    }
  }
  return false;
}

// Clears rows of k and v that hold a NaN or an infinity and that nobody attends. All consumers. Rows are looked for
// only where something is not finite, which is seldom.
template <class C>
__device__ void clear_closed_keys(const Params& p, SharedMemory<C>& shared) {
  constexpr int kThreadsOfRow = 128 * kConsumers / C::kTileK, kChunks = kPanel * sizeof(typename C::Element) / 16;
  using T = typename C::Element;
  const Work& w = shared.work;
  const int thread = static_cast<int>(threadIdx.x) - 128, row = thread / kThreadsOfRow;
  std::uint32_t found = 0;
#pragma unroll 1
  for (int n = thread % kThreadsOfRow; n < decltype(shared.k)::kPanels * kChunks; n += kThreadsOfRow) {
    const auto chunk = [&](const auto& tile) {
      return reinterpret_cast<const uint4*>(tile.panel[n / kChunks][row])[n % kChunks];
    };
    found |= attention::not_finite<T>(chunk(shared.k)) | attention::not_finite<T>(chunk(shared.v));
  }
#pragma unroll
  for (int lanes = 1; lanes < kThreadsOfRow; lanes *= 2) found |= __shfl_xor_sync(0xffffffff, found, lanes);
  if (thread % kThreadsOfRow == 0) shared.suspect[row] = found != 0;
  consumers_meet();
#pragma unroll 1
  for (int key = w.begin; key < w.keys; ++key) {
    if (!shared.suspect[key]) continue;
    if (thread == 0) shared.attended = false;
    consumers_meet();
    if (some_row_attends<C>(p, w, w.first_key + key, thread, 128 * kConsumers)) shared.attended = true;
    consumers_meet();
    if (!shared.attended) {
      clear_rows(shared.k, key, key + 1, thread, 128 * kConsumers);
      clear_rows(shared.v, key, key + 1, thread, 128 * kConsumers);
    }
    consumers_meet();
  }
}

}  // namespace heddle::cuda::sm90::attention_bwd
