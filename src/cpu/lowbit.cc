#include "cpu/lowbit.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "core/parallel.h"
#include "cpu/kernels.h"

namespace heddle::cpu {
namespace {

using lowbit::Matrix;
using lowbit::QuantizeProblem;
using lowbit::Weights;

// Weights that a task should at least have: below this the hand-over costs more than the work.
constexpr std::int64_t kTaskWeights = std::int64_t{1} << 15;

// Calls row(n) for every row, in tasks of whole rows.
template <class Row>
void for_each_row(std::int64_t rows, std::int64_t columns, Executor& executor, const Row& row) {
  if (rows == 0) return;
  const std::int64_t chunk = std::max<std::int64_t>(1, kTaskWeights / std::max<std::int64_t>(columns, 1));
  struct Loop {
    std::int64_t rows, chunk;
    const Row& row;
  } loop{rows, chunk, row};
  parallel_for(executor, (rows + chunk - 1) / chunk, [&loop](std::int64_t task, int) {
    const std::int64_t end = std::min(loop.rows, (task + 1) * loop.chunk);
    for (std::int64_t n = task * loop.chunk; n < end; ++n) loop.row(n);
  });
}

// Calls piece(k, count) for a row's columns, a chunk at a time.
template <class Piece>
void for_each_chunk(std::int64_t columns, const Piece& piece) {
  for (std::int64_t k = 0; k < columns; k += kLowbitChunk) piece(k, std::min(kLowbitChunk, columns - k));
}

}  // namespace

std::uint32_t largest_weight(const Weights& weights, std::int64_t rows, std::int64_t columns, Executor& executor) {
  const LowbitKernels& kernel = kernels().lowbit;
  std::atomic<std::uint32_t> largest{0};
  for_each_row(rows, columns, executor, [&](std::int64_t n) {
    const std::uint32_t here = kernel.largest(weights, n, columns);
    std::uint32_t most = largest.load(std::memory_order_relaxed);
    while (here > most && !largest.compare_exchange_weak(most, here, std::memory_order_relaxed)) {
    }
  });
  return largest.load();
}

void quantize(const QuantizeProblem& p, Executor& executor) {
  const LowbitKernels& kernel = kernels().lowbit;
  if (p.out.format.global_scale) *p.out.global_scale = p.global_scale;
  for_each_row(p.out.N, p.out.K, executor, [&](std::int64_t n) { kernel.encode(p, n); });
}

void dequantize(const Matrix& matrix, const Weights& out, Executor& executor) {
  const Kernels& kernel = kernels();
  const bool in_place = out.dtype == DType::f32 && out.stride_k == 1;
  for_each_row(matrix.N, matrix.K, executor, [&](std::int64_t n) {
    for_each_chunk(matrix.K, [&](std::int64_t k, std::int64_t count) {
      if (in_place) {
        kernel.lowbit.decode(matrix, n, k, count, reinterpret_cast<float*>(out.at(n, k)));
        return;
      }
      alignas(64) float buffer[kLowbitChunk];
      kernel.lowbit.decode(matrix, n, k, count, buffer);
      kernel.store_row(buffer, count, out.at(n, k), out.dtype, out.stride_k);
    });
  });
}

void row_errors(const Weights& weights, const Matrix& matrix, RowError* errors, Executor& executor) {
  const Kernels& kernel = kernels();
  for_each_row(matrix.N, matrix.K, executor, [&](std::int64_t n) {
    RowError sums;
    for_each_chunk(matrix.K, [&](std::int64_t k, std::int64_t count) {
      alignas(64) float found[kLowbitChunk], wanted[kLowbitChunk];
      kernel.lowbit.decode(matrix, n, k, count, found);
      kernel.load_row(weights.at(n, k), weights.dtype, weights.stride_k, count, count, wanted);
      for (std::int64_t j = 0; j < count; ++j) {
        const double w = wanted[j], d = std::abs(found[j] - w);
        sums.signal += w * w;
        sums.noise += d * d;
        sums.magnitude += d;
        if (!(d <= sums.max)) {  // a NaN stays the largest
          if (!std::isnan(sums.max)) sums.max_column = k + j;
          sums.max = std::isnan(sums.max) ? sums.max : d;
        }
      }
    });
    errors[n] = sums;
  });
}

}  // namespace heddle::cpu
