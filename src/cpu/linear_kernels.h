// What one SIMD target does for linear layers over packed weights (see kernels.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem/linear.h"

namespace heddle::cpu {

// Rows of x that share one decoding of the weights.
constexpr std::int64_t kLinearChunk = 128;
// Up to so many, weights are multiplied as soon as they are decoded, in f32.
constexpr std::int64_t kLinearFewRows = 8;
// Rows of W of one task: panels of 16 that make whole register tiles on every target.
constexpr std::int64_t kLinearPanels = 3, kLinearTile = kLinearPanels * lowbit::kPanelRows;

// Columns whose sums of products in 8 bits stay below 2^24 and are exact in f32; with weights of 8 bits below 2^31.
constexpr std::int64_t kInt8Columns = 4096;

// Rows of x in 8 bits: [rows up to eights][columns / 8][even, odd columns of eight, four bytes each]; with weights of 8
// bits in the order of the columns.
struct Int8Rows {
  const std::uint32_t* words = nullptr;
  const float* scales = nullptr;  // [rows]
  const float* totals = nullptr;  // [rows][spans]: sums over a group's columns, at most kInt8Columns of them at a time
  std::int64_t spans = 0;
};

// Outputs of rows [m_begin, m_begin + m_count) of x, at most kLinearChunk, and of rows kLinearTile * tile and on of W.
struct LinearTask {
  std::int64_t m_begin = 0, m_count = 0, tile = 0;
  Int8Rows int8;       // words: null unless products are in integers
  bool pairs = false;  // products of bf16 pairs
  // Rows from m_begin on, [m_count up to whole tiles][layout.columns], zeros beyond m_count: f32, pairs: bf16.
  const void* x = nullptr;
};

// A norm in front of the product, its parameters widened.
struct NormParameters {
  Norm kind = Norm::none;
  double eps = 0;
  const float *weight = nullptr, *bias = nullptr;  // [K]; null: ones, zeros
};

// Columns of dx of one task.
constexpr std::int64_t kGradientColumns = 64;

// The backward of up to kLinearChunk rows: dz, the gradients of the sums x W^T + bias, rows of x in lanes.
struct LinearGradientRows {
  std::int64_t m_begin = 0, m_count = 0, lanes = 0;  // lanes: m_count up to whole vectors of every target
  bool pairs = false;                                // dz in bf16, and products of pairs
  void* dz = nullptr;       // [N up to tiles][lanes] f32; pairs: [.. / 2][lanes] words of two neighbouring sums
  float* dbias = nullptr;   // [N up to tiles], added to; or null
  float* normed = nullptr;  // [m_count][columns]: gradients of rows with their norm; null: they are dx
};

struct LinearFunctions {
  std::size_t (*scratch)();  // bytes of one task
  void (*forward)(const LinearProblem&, const LinearTask&, std::byte* scratch);
  // The norm of one row, written as f32 or bf16.
  void (*norm_row)(const NormParameters&, const std::byte* x, DType dtype, std::int64_t K, std::byte* to,
                   DType to_dtype);
  // The activation of one row of N sums, written as f32 or bf16; of swiglu N / 2 numbers.
  void (*activate_row)(Activation, const float* sums, std::int64_t N, std::byte* to, DType to_dtype);
  std::size_t (*gradient_scratch)();  // bytes of one task of the backward
  // dz of rows kLinearTile * task.tile and on of W; task is the forward's, of the same rows of x.
  void (*sums_gradient)(const LinearBackwardProblem&, const LinearTask& task, const LinearGradientRows&,
                        std::byte* scratch);
  // Columns kGradientColumns * block and on of dz W, to `normed` or to dx.
  void (*rows_gradient)(const LinearBackwardProblem&, const LinearGradientRows&, std::int64_t block,
                        std::byte* scratch);
  // Row m of dx through the norm; statistics: its mean and 1 / deviation, which it writes. to: null if not wanted.
  void (*norm_gradient)(const NormParameters&, const std::byte* x, DType dtype, std::int64_t K, const float* normed,
                        std::byte* to, double statistics[2]);
  // Adds sums over m_count rows, of columns [begin, begin + count), to [K] dnorm_weight and dnorm_bias, if not null.
  void (*norm_parameters_gradient)(const LinearBackwardProblem&, const LinearGradientRows&, const double* statistics,
                                   std::int64_t begin, std::int64_t count, float* dnorm_weight, float* dnorm_bias);
};

}  // namespace heddle::cpu
