// Exact attention forward on tensor cores with mma.sync, every option. One CTA takes one query tile; each warp owns its
// rows from the first product to the last store. See docs/kernels/sm80_attention_fwd.md.
#pragma once

#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention_fwd/consumer.cuh"
#include "cuda/sm80/attention_fwd/epilogue.cuh"
#include "cuda/sm80/attention_fwd/loader.cuh"
#include "cuda/sm80/attention_fwd/products_16bit.cuh"
#include "cuda/sm80/attention_fwd/products_int8.cuh"
#include "cuda/sm80/attention_fwd/products_tf32.cuh"
#include "cuda/sm80/attention_fwd/schedule.cuh"

namespace heddle::cuda::sm80::attention_fwd {

// While S = Q K^T is computed, the values of the same key tile are on their way; while softmax and P V are, the keys of
// the next. One buffer each is enough, and two CTAs on a multiprocessor fill each other's waits.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) attention_fwd_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  const auto& w = shared.work;
  if (threadIdx.x == 0) shared.work = describe_work<C>(p);
  __syncthreads();
  if (w.first >= w.q_rows) return;

  Consumer<C> rows(p, w, shared);
  if (!w.walk.steps().empty()) {
    const int tile = w.walk.index(w.walk.steps().end - 1);
    load_q<C>(p, w, shared);
    load_k<C>(p, w, tile, shared);
    ptx::copy_async_commit();
    load_v<C>(p, w, tile, shared);
    ptx::copy_async_commit();
    ptx::copy_async_wait<1>();
    __syncthreads();
    if constexpr (C::kKeptSteps > 0) keep_q(rows);
  }
#pragma unroll 1
  for (int step = w.walk.steps().end - 1; step >= w.walk.steps().begin; --step) {  // the last keys first
    const int tile = w.walk.index(step);
    multiply_qk(rows, tile);
    rows.finish_scores(tile);
    ptx::copy_async_wait<0>();
    __syncthreads();
    if (step > w.walk.steps().begin) {
      load_k<C>(p, w, w.walk.index(step - 1), shared);
      ptx::copy_async_commit();
    }
    rows.rescale();
    multiply_pv(rows, tile);
    if (step > w.walk.steps().begin) {
      ptx::copy_async_wait<0>();
      __syncthreads();
      load_v<C>(p, w, w.walk.index(step - 1), shared);
      ptx::copy_async_commit();
    }
  }

  if constexpr (Int8Qk<C>) __syncthreads();  // rows of O go where other warps may still read v
  const int warp_row = threadIdx.x / 32 * kGroupRows * C::kGroups;
  float inverse[C::kGroups][2];
  finish_rows<C>(p, w, rows, warp_row, inverse);
  store_rows<C>(p, w, rows, warp_row, inverse, shared);
}

}  // namespace heddle::cuda::sm80::attention_fwd
