// From the warps' results to the segment's, from the segments' to the unit's, and from there to o and lse. Results are
// merged in the order of their keys, so that bits do not depend on which CTA comes last.
#pragma once

#include <type_traits>

#include "cuda/common/attention/exponents.cuh"
#include "cuda/common/attention/merge.cuh"
#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention_decode/consumer.cuh"

namespace heddle::cuda::sm80::attention_decode {

using Result = PartialRow<true>;

// Calls visit(row, d) for each four dimensions of the tile's rows, dealt out to the threads.
template <class C, class Visit>
__device__ void for_each_four(int rows, Visit visit) {
  constexpr int kFours = C::kHeadSize / 4;
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < rows * kFours; n += C::kThreads) visit(n / kFours, n % kFours * 4);
}

template <class C>
__device__ void put_down(const Consumer<C>& rows, WarpResult<C>& to) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    const float sum = sum_of_quad(rows.sum[r]);
    if (lane % 4 == 0) to.statistics[row] = {rows.max[r], sum};
#pragma unroll
    for (int g = 0; g < C::kValuePieces; ++g) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int j = 0; j < C::kPiece; j += 4) {
          const int n = C::kPiece * g + j, i = 2 * r + c;
          *reinterpret_cast<float4*>(&to.o[row][C::kPiece * (8 * g + 2 * (lane % 4) + c) + j]) = {
              rows.o[n][i], rows.o[n + 1][i], rows.o[n + 2][i], rows.o[n + 3][i]};
        }
      }
    }
  }
}

template <class C>
__device__ Result of_warps(const SharedMemory<C>& shared, int row, int d) {
  Result all;
#pragma unroll
  for (int w = 0; w < C::kWarps; ++w) {
    const WarpResult<C>& one = shared.result[w];
    all.join({one.statistics[row].x, one.statistics[row].y, *reinterpret_cast<const float4*>(&one.o[row][d])});
  }
  return all;
}

template <class C>
__device__ float* partial_o(const Params& p, std::int64_t slot, int row, int d) {
  return p.partial_o + ((slot * p.tile_rows + row) * C::kHeadSize + d);
}

template <class C>
__device__ Result of_segments(const Params& p, const Segment& s, int row, int d) {
  constexpr int kBatch = 16;  // on their way together
  Result all;
#pragma unroll 1
  for (int first = 0; first < s.count; first += kBatch) {
    float2 statistics[kBatch];
    float4 o[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const std::int64_t slot = Schedule<C>::slot_of(s, min(first + n, s.count - 1));
      // Written in this launch by other multiprocessors: not through this one's first cache.
      statistics[n] = __ldcg(p.partial_statistics + slot * kRows + row);
      o[n] = __ldcg(reinterpret_cast<const float4*>(partial_o<C>(p, slot, row, d)));
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      if (first + n < s.count) all.join({statistics[n].x, statistics[n].y, o[n]});
    }
  }
  return all;
}

// Four dimensions of a row of o, and lse with the first of them.
template <class C>
__device__ void write_row(const Params& p, const Extent& e, const Segment& s, int row, int d, const Result& result) {
  using T = typename C::Element;
  const AttentionProblem& a = p.problem;
  const PackedRow at(p, s, row);
  if (at.i >= e.q_rows) return;
  float sum = at.i < e.sq ? result.sum : 0.0f, top = result.max;
  float inverse = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
  if (a.sink.data != nullptr && at.i < e.sq) {
    // The sink joins the sum. Both are taken relative to the larger logit, so that nothing overflows.
    const float sink = reinterpret_cast<const float*>(a.sink.data)[at.h * a.sink.stride_h];
    top = fmaxf(result.max, sink);
    const float factor = exp_of_difference(result.max, top);
    const bool any = sum != 0.0f;
    sum = sum * factor + exp_of_difference(sink, top);
    inverse = any ? __fdividef(factor, sum) : 0.0f;
  }
  if (d == 0 && a.lse.data != nullptr) {
    reinterpret_cast<float*>(
        a.lse.data)[s.b * a.lse.stride_b + at.h * a.lse.stride_h + (e.q_row + at.i) * a.lse.stride_i] =
        sum == 0.0f ? -INFINITY : top + __logf(sum);
  }
  const std::int64_t element =
      s.b * a.o.stride_b + (e.q_row + at.i) * a.o.stride_s + at.h * a.o.stride_h + d * a.o.stride_d;
  const float o[4] = {result.o.x, result.o.y, result.o.z, result.o.w};
  const auto store = [&](auto* to) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      // Selected, not multiplied: a row without keys is 0.
      if (d + n < a.Dv) {
        to[n * a.o.stride_d] =
            static_cast<std::remove_pointer_t<decltype(to)>>(inverse == 0.0f ? 0.0f : o[n] * inverse);
      }
    }
  };
  if (a.o.dtype == DType::f32) {
    store(reinterpret_cast<float*>(a.o.data) + element);
  } else {
    store(reinterpret_cast<T*>(a.o.data) + element);
  }
}

// The word that says "this slot's partial result is there". The workspace is not cleared before a launch, so the word
// is one that no other use of the memory leaves behind by chance; and whoever merges erases it for the next launch.
__device__ inline std::uint64_t ready_word(std::int64_t slot) {
  return 0x9E6C63D0876A9A47u ^ static_cast<std::uint64_t>(slot) << 1;
}

// Says that this segment's partial result is there, and asks for the others of its unit. True if all are there: for the
// last CTA to come, and perhaps for others that come at the same time, which then write the same.
template <class C>
__device__ bool is_last(const Params& p, const Segment& s) {
  __syncthreads();
  bool all = true;
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) {
      __threadfence();  // after all threads' results
      ptx::store_relaxed(p.ready + s.slot, ready_word(s.slot));
    }
    __syncwarp();
    __threadfence();  // writes its own word before it reads the others': of two CTAs at least one sees both words
    for (int i = static_cast<int>(threadIdx.x); i < s.count; i += 32) {
      const std::int64_t slot = Schedule<C>::slot_of(s, i);
      all &= ptx::load_relaxed(p.ready + slot) == ready_word(slot);
    }
    __threadfence();  // before what the words stand for is read
  }
  const bool last = __syncthreads_and(all);
  if (last) {
    for (int i = static_cast<int>(threadIdx.x); i < s.count; i += C::kThreads) {
      ptx::store_relaxed(p.ready + Schedule<C>::slot_of(s, i), 0);
    }
  }
  return last;
}

// The end of a segment.
template <class C>
__device__ void finish_segment(const Params& p, const Extent& e, const Segment& s, const Consumer<C>& consumer,
                               SharedMemory<C>& shared) {
  __syncthreads();  // all warps are done with their stages, where results go
  put_down<C>(consumer, shared.result[threadIdx.x / 32]);
  __syncthreads();
  const int rows = min(kRows, e.q_rows * static_cast<int>(p.group.divisor) - kRows * s.tile);
  if (s.whole) {
    for_each_four<C>(rows, [&](int row, int d) { write_row<C>(p, e, s, row, d, of_warps<C>(shared, row, d)); });
    return;
  }
  for_each_four<C>(rows, [&](int row, int d) {
    const Result result = of_warps<C>(shared, row, d);
    __stcg(reinterpret_cast<float4*>(partial_o<C>(p, s.slot, row, d)), result.o);
    if (d == 0) __stcg(p.partial_statistics + s.slot * kRows + row, {result.max, result.sum});
  });
  if (!is_last<C>(p, s)) return;
  for_each_four<C>(rows, [&](int row, int d) { write_row<C>(p, e, s, row, d, of_segments<C>(p, s, row, d)); });
}

}  // namespace heddle::cuda::sm80::attention_decode
