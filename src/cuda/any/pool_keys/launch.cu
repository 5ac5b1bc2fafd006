// The kernels: a thread sums a piece of a row, in the order of the rows that it is made of, as the CPU does.
#include "core/check.h"
#include "cuda/any/pool_keys/host.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/requirements.h"

namespace heddle::cuda {
namespace {

constexpr int kThreads = 128;

template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Piece {
  T element[kCount];
};

template <class T, int kCount>
__device__ Piece<T, kCount>* piece_at(const Operand& x, std::int64_t b, std::int64_t row, std::int64_t h,
                                      std::int64_t d) {
  return reinterpret_cast<Piece<T, kCount>*>(reinterpret_cast<T*>(x.at(b, row, h)) + d * (kCount > 1 ? 1 : x.stride_d));
}

// One row of `to`: rows [first, end) of `from` summed and divided by the block's size.
using Sum = PoolProblem::Sum;

__device__ inline Sum gradient_sum(const PoolProblem& p, std::int64_t at) {
  const std::int64_t batch = at / p.S, row = at % p.S;
  const PoolProblem::Sequence s = p.sequence(p.packed() ? p.sequence_of(row, false) : batch);
  const std::int64_t j = row - s.x_begin, after = clamped(j / p.stride + 1, 0, s.pooled);
  const std::int64_t first = clamped(j < p.block ? 0 : (j - p.block) / p.stride + 1, 0, after);
  return {batch, row, s.pooled_begin + first, s.pooled_begin + (j < 0 ? first : after)};
}

// kPaged: of a cache in pages.
template <class T, int kCount, bool kGradient, bool kPaged = false>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const __grid_constant__ PoolProblem p, std::int64_t rows, int pieces) {
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, line = thread / pieces;
  if (line >= rows * p.H) return;
  const std::int64_t d = (thread - line * pieces) * kCount, at = line / p.H, h = line - at * p.H;
  const Sum sum = kGradient ? gradient_sum(p, at) : p.written_row(at);
  if (sum.row < 0) return;
  const Operand &from = kGradient ? p.pooled : p.x, &to = kGradient ? p.x : p.pooled;
  float x[kCount] = {};
  const auto add = [&](std::int64_t batch, std::int64_t first, std::int64_t end) {
#pragma unroll 32
    for (std::int64_t row = first; row < end; ++row) {
      const Piece<T, kCount> piece = *piece_at<T, kCount>(from, batch, row, h, d);
#pragma unroll
      for (int e = 0; e < kCount; ++e) x[e] += static_cast<float>(piece.element[e]);
    }
  };
  PoolProblem::Place place{sum.batch, sum.row};
  if constexpr (kPaged) {
    static_assert(!kGradient);
    for (std::int64_t row = sum.first; row < sum.end;) {
      const PoolProblem::Place at = p.place(sum.batch, row, p.page_size);
      const std::int64_t count = min(sum.end - row, p.page_size - at.row);
      add(at.batch, at.row, at.row + count);
      row += count;
    }
    place = p.place(sum.batch, sum.row, p.pooled_page_size());
  } else {
    add(sum.batch, sum.first, sum.end);
  }
  Piece<T, kCount> out;
#pragma unroll
  for (int e = 0; e < kCount; ++e) out.element[e] = static_cast<T>(x[e] / static_cast<float>(p.block));
  *piece_at<T, kCount>(to, place.batch, place.row, h, d) = out;
}

std::int64_t wide(const PoolProblem& p) { return 16 / static_cast<std::int64_t>(size_of(p.x.dtype)); }
bool in_pieces(const PoolProblem& p) {
  return p.D % wide(p) == 0 && has_rows_of_16_bytes(p.x) && has_rows_of_16_bytes(p.pooled);
}

template <class T, bool kGradient>
void start_sums(const char* operation, const PoolProblem& p, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  const bool aligned = in_pieces(p);
  const std::int64_t rows = p.batches() * (kGradient ? p.S : p.written_rows()), pieces = p.D / (aligned ? kWide : 1);
  const std::int64_t blocks = (rows * p.H * pieces + kThreads - 1) / kThreads;
  auto kernel = aligned ? sum_kernel<T, kWide, kGradient> : sum_kernel<T, 1, kGradient>;
  if constexpr (!kGradient) {
    if (p.page_table) kernel = aligned ? sum_kernel<T, kWide, false, true> : sum_kernel<T, 1, false, true>;
  }
  start(operation, kernel, {static_cast<unsigned>(blocks), kThreads}, stream, p, rows, static_cast<int>(pieces));
}

template <bool kGradient>
void start_sums(const char* operation, const PoolProblem& p, void* stream) {
  const auto to = static_cast<cudaStream_t>(stream);
  if (p.x.dtype == DType::f32) return start_sums<float, kGradient>(operation, p, to);
  if (p.x.dtype == DType::f16) return start_sums<__half, kGradient>(operation, p, to);
  start_sums<__nv_bfloat16, kGradient>(operation, p, to);
}

}  // namespace

void pool(const PoolProblem& p, void* stream) { start_sums<false>("pool_keys", p, stream); }
void pool_backward(const PoolBackwardProblem& p, void* stream) { start_sums<true>("pool_keys_backward", p, stream); }

std::string describe_pool(const PoolProblem& p) {
  return in_pieces(p) ? "a thread for 16 bytes of a row" : "a thread for each element of a row";
}

}  // namespace heddle::cuda
