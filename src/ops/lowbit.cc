// Quantisation of weights and back: check everything, then write.
#include "heddle/lowbit.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "core/overlap.h"
#include "core/runtime.h"
#include "cpu/lowbit.h"
#include "cuda/lowbit.h"
#include "lowbit/scale_rules.h"
#include "ops/lowbit_arguments.h"

namespace heddle::lowbit {
namespace {

double decibels(double signal, double noise) {
  return noise == 0 ? std::numeric_limits<double>::infinity() : 10 * std::log10(signal / noise);
}

// What is written is looked at when it is written: the host waits for the GPU once.
void quantize_on_gpu(const Check& check, const QuantizeProblem& p, const Runtime& runtime) {
  check_workspace(check, runtime.workspace, cuda::kQuantizeWorkspace);
  void* const memory = runtime.workspace.data;
  const cuda::QuantizeFindings found = cuda::quantize(p, memory, runtime.stream);
  if (p.importance != nullptr && found.bad_importance < p.out.K) {
    refuse_importance(found.bad_importance, cuda::importance_at(p, found.bad_importance, runtime.stream));
  }
  const auto largest = std::bit_cast<float>(found.largest);
  if (largest <= weight_limit(p.out.format)) return;
  const float limit = std::isfinite(largest) ? weight_limit(p.out.format) : std::numeric_limits<float>::max();
  const cuda::FoundWeight bad = cuda::first_weight_beyond(p, limit, memory, runtime.stream);
  refuse_weight(p.out.format, bad.row, bad.column, bad.value);
}

}  // namespace

void quantize(const TensorView& weights, const QuantizeOptions& options, const QuantizedMatrix& out,
              const Runtime& runtime) {
  const Check check("quantize");
  QuantizeProblem p = checked_problem(check, weights, options, out);
  if (weights.device == Device::cuda) return quantize_on_gpu(check, p, runtime);
  Executor& executor = executor_of(runtime);
  const std::uint32_t largest = cpu::largest_weight(p.weights, p.out.N, p.out.K, executor);
  check_values(p, largest);
  if (p.out.format.global_scale && p.global_scale == 0.0f) {
    p.global_scale = own_global_scale(p.rule, std::bit_cast<float>(largest));
  }
  cpu::quantize(p, executor);
}

std::size_t quantize_workspace(const TensorView& weights) {
  return weights.device == Device::cuda ? cuda::kQuantizeWorkspace : 0;
}

void dequantize(const QuantizedMatrix& matrix, const TensorView& out, const Runtime& runtime) {
  const Check check("dequantize");
  const Weights to = checked_weights(check, out, "out", std::nullopt);
  check.require(out.shape[0] == matrix.rows && out.shape[1] == matrix.columns, "out is ", out, ": it must be [",
                matrix.rows, ", ", matrix.columns, "], as the matrix is");
  check.not_overlapping(out, "out");
  const Matrix from = checked_matrix(check, matrix, "matrix", out.device);
  for (const TensorView* view : {&matrix.codes, &matrix.scales, &matrix.zeros, &matrix.global_scale}) {
    check.require(!view->given() || !may_share_memory(out, *view), "out shares memory with the matrix");
  }
  if (out.device == Device::cuda) return cuda::dequantize(from, to, runtime.stream);
  cpu::dequantize(from, to, executor_of(runtime));
}

std::size_t quantization_error_workspace(std::int64_t rows) {
  return static_cast<std::size_t>(std::max<std::int64_t>(rows, 0)) * sizeof(cpu::RowError);
}

QuantizationError quantization_error(const TensorView& weights, const QuantizedMatrix& matrix,
                                     const TensorView& row_sqnr, const TensorView& row_max, const Runtime& runtime) {
  const Check check("quantization_error");
  const Weights from = checked_weights(check, weights, "weights");
  check.require(matrix.rows == weights.shape[0] && matrix.columns == weights.shape[1], "matrix is [", matrix.rows, ", ",
                matrix.columns, "] and weights is ", weights, ": they must be equal");
  const Matrix m = checked_matrix(check, matrix, "matrix");
  for (const auto& [view, name] : {std::pair{&row_sqnr, "row_sqnr"}, std::pair{&row_max, "row_max"}}) {
    if (!view->given()) continue;
    check.tensor(*view, name, DType::f32, Device::cpu, 1, "weights");
    check.require(view->shape[0] == m.N, name, " is ", *view, ": it must be [N] = [", m.N, "]");
    check.not_overlapping(*view, name);
  }
  const std::size_t needed = quantization_error_workspace(m.N);
  check_workspace(check, runtime.workspace, needed, "as quantization_error_workspace() says");
  auto* rows = static_cast<cpu::RowError*>(runtime.workspace.data);
  cpu::row_errors(from, m, rows, executor_of(runtime));

  QuantizationError total;
  double signal = 0, noise = 0, magnitude = 0;
  for (std::int64_t n = 0; n < m.N; ++n) {
    signal += rows[n].signal;
    noise += rows[n].noise;
    magnitude += rows[n].magnitude;
    if (!(rows[n].max <= total.max) && !std::isnan(total.max)) {
      total.max = rows[n].max;
      total.max_row = n;
      total.max_column = rows[n].max_column;
    }
    const auto set = [n](const TensorView& view, double value) {
      if (view.given()) static_cast<float*>(view.data)[n * view.stride[0]] = static_cast<float>(value);
    };
    set(row_sqnr, decibels(rows[n].signal, rows[n].noise));
    set(row_max, rows[n].max);
  }
  total.sqnr = decibels(signal, noise);
  total.mean = m.N * m.K > 0 ? magnitude / static_cast<double>(m.N * m.K) : 0.0;
  return total;
}

}  // namespace heddle::lowbit
