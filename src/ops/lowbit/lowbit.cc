// Quantisation of weights and back: check everything, then write.
#include "heddle/lowbit.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "core/overlap.h"
#include "core/runtime.h"
#include "cpu/lowbit.h"
#include "ops/lowbit/arguments.h"
#include "ops/lowbit/choice.h"

namespace heddle::lowbit {
namespace {

double decibels(double signal, double noise) {
  return noise == 0 ? std::numeric_limits<double>::infinity() : 10 * std::log10(signal / noise);
}

DequantizeProblem checked_dequantize_problem(const Check& check, const QuantizedMatrix& matrix, const TensorView& out) {
  const Weights to = checked_weights(check, out, "out", std::nullopt);
  check.require(out.shape[0] == matrix.rows && out.shape[1] == matrix.columns, "out is ", out, ": it must be [",
                matrix.rows, ", ", matrix.columns, "], as the matrix is");
  check.not_overlapping(out, "out");
  const Matrix from = checked_matrix(check, matrix, "matrix", out.device);
  for (const TensorView* view : {&matrix.codes, &matrix.scales, &matrix.zeros, &matrix.global_scale}) {
    check.require(!view->given() || !may_share_memory(out, *view), "out shares memory with the matrix");
  }
  return {from, to, out.device};
}

}  // namespace

void quantize(const TensorView& weights, const QuantizeOptions& options, const QuantizedMatrix& out,
              const Runtime& runtime) {
  const Check check("quantize");
  BadValues found;
  const QuantizeCall call{checked_problem(check, weights, options, out), weights.device, &found};
  const int workers = workers_of(runtime);
  const QuantizeKernel& kernel = choose(check, call, wish_of<QuantizeCall>(check, options.force), workers);
  run(check, "quantize", kernel, call, runtime, kernel.workspace(call, workers));
  if (found.importance) refuse_importance(found.importance->column, found.importance->value);
  if (found.weight) refuse_weight(out.format, found.weight->row, found.weight->column, found.weight->value);
}

std::size_t quantize_workspace(const TensorView& weights, const QuantizeOptions& options, const QuantizedMatrix& out,
                               const Runtime& runtime) {
  const Check check("quantize", Data::to_come);
  const QuantizeCall call{checked_problem(check, weights, options, out), weights.device};
  const int workers = workers_of(runtime);
  return choose(check, call, wish_of<QuantizeCall>(check, options.force), workers).workspace(call, workers);
}

std::vector<Candidate> explain_quantize(const TensorView& weights, const QuantizeOptions& options,
                                        const QuantizedMatrix& out, const Runtime& runtime) {
  const Check check("explain_quantize", Data::to_come);
  return explained(QuantizeCall{checked_problem(check, weights, options, out), weights.device},
                   wish_of<QuantizeCall>(check, options.force), workers_of(runtime));
}

void dequantize(const QuantizedMatrix& matrix, const TensorView& out, const DequantizeOptions& options,
                const Runtime& runtime) {
  const Check check("dequantize");
  const DequantizeProblem p = checked_dequantize_problem(check, matrix, out);
  const int workers = workers_of(runtime);
  const DequantizeKernel& kernel = choose(check, p, wish_of<DequantizeProblem>(check, options.force), workers);
  run(check, "dequantize", kernel, p, runtime, kernel.workspace(p, workers));
}

std::vector<Candidate> explain_dequantize(const QuantizedMatrix& matrix, const TensorView& out,
                                          const DequantizeOptions& options, const Runtime& runtime) {
  const Check check("explain_dequantize", Data::to_come);
  return explained(checked_dequantize_problem(check, matrix, out), wish_of<DequantizeProblem>(check, options.force),
                   workers_of(runtime));
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
