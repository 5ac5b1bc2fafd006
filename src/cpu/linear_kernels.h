// What one SIMD target does for linear layers over packed weights (see kernels.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/linear_problem.h"

namespace heddle::cpu {

// Rows of x that share one decoding of the weights.
constexpr std::int64_t kLinearChunk = 128;
// Up to so many, weights are multiplied as soon as they are decoded, in f32.
constexpr std::int64_t kLinearFewRows = 8;
// Rows of W of one task: panels of 16 that make whole register tiles on every target.
constexpr std::int64_t kLinearPanels = 3, kLinearTile = kLinearPanels * lowbit::kPanelRows;

// Columns whose sums of products in 8 bits stay below 2^24 and are exact in f32.
constexpr std::int64_t kInt8Columns = 4096;

// Rows of x in 8 bits: [rows up to eights][columns / 8][even, odd columns of eight, four bytes each].
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
  const void* x =
      nullptr;  // rows [m_begin, ..): f32, pairs: bf16; [m_count up to eights][layout.columns], zeros beyond
};

// A norm in front of the product, its parameters widened.
struct NormParameters {
  Norm kind = Norm::none;
  double eps = 0;
  const float *weight = nullptr, *bias = nullptr;  // [K]; null: ones, zeros
};

struct LinearKernels {
  std::size_t (*scratch)();  // bytes of one task
  void (*forward)(const LinearProblem&, const LinearTask&, std::byte* scratch);
  // The norm of one row, written as f32 or bf16.
  void (*norm_row)(const NormParameters&, const std::byte* x, DType dtype, std::int64_t K, std::byte* to,
                   DType to_dtype);
};

}  // namespace heddle::cpu
