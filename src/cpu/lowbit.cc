#include "cpu/lowbit.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <optional>
#include <string>

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/kernels.h"

namespace heddle::cpu {
namespace {

using lowbit::DequantizeProblem;
using lowbit::Matrix;
using lowbit::QuantizeCall;
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

namespace {

void launch_quantize(const QuantizeCall& call, const Runtime& runtime) {
  Executor& executor = *runtime.executor;
  const Matrix& out = call.problem.out;
  const std::uint32_t largest = largest_weight(call.problem.weights, out.N, out.K, executor);
  const std::optional<QuantizeProblem> p = encodable(call, std::bit_cast<float>(largest));
  if (!p) return;
  const LowbitKernels& kernel = kernels().lowbit;
  if (out.format.global_scale) *out.global_scale = p->global_scale;
  for_each_row(out.N, out.K, executor, [&](std::int64_t n) { kernel.encode(*p, n); });
}

void launch_dequantize(const DequantizeProblem& p, const Runtime& runtime) {
  dequantize(p.matrix, p.out, *runtime.executor);
}

// Seconds of a weight on one thread, as an Intel Xeon of 2023 has them with AVX2.
double seconds_each(const QuantizeProblem& p) {
  constexpr double kPlain = 2e-9, kTwoScales = 10e-9, kNeighbours = 15e-9, kGrid = 40e-9;
  if (p.rule == lowbit::ScaleRule::four_six) return kTwoScales;
  if (p.rule != lowbit::ScaleRule::mse) return kPlain;
  return p.out.format.element == lowbit::Element::e2m1 ? kNeighbours : kGrid;
}

double estimate_quantize(const QuantizeCall& call, int workers) {
  const Matrix& out = call.problem.out;
  return static_cast<double>(out.N * out.K) * seconds_each(call.problem) / workers;
}

double estimate_dequantize(const DequantizeProblem& p, int workers) {
  constexpr double kBytes = 12e9;  // a second, of one thread of the same
  return p.bytes() / (kBytes * workers);
}

std::string in_rows(int workers) {
  return text(kernels().name, ", row by row, ", workers, workers == 1 ? " thread" : " threads");
}

}  // namespace

const lowbit::QuantizeKernel kQuantize = {
    .name = "cpu",
    .method = "quantize",
    .device = Device::cpu,
    .automatic = true,
    .supports = serves_all,
    .estimate = estimate_quantize,
    .workspace = no_workspace,
    .launch = launch_quantize,
    .describe = [](const QuantizeCall&, int workers) { return in_rows(workers); },
};

const lowbit::DequantizeKernel kDequantize = {
    .name = "cpu",
    .method = "dequantize",
    .device = Device::cpu,
    .automatic = true,
    .supports = serves_all,
    .estimate = estimate_dequantize,
    .workspace = no_workspace,
    .launch = launch_dequantize,
    .describe = [](const DequantizeProblem&, int workers) { return in_rows(workers); },
};

}  // namespace heddle::cpu
