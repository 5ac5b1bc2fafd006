// What linear layers make of rows of x before their tasks: widened or normalised, or rounded to 8 bits, once a row.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/linear_kernels.h"
#include "heddle/runtime.h"
#include "problem/linear.h"

namespace heddle::cpu {

// Whether products are taken in bf16 pairs.
bool in_pairs(const LinearProblem& p);

// The place of up to kLinearChunk rows of x, and of the norm's parameters.
struct StagedRows {
  std::byte* rows = nullptr;  // [rows][columns] f32, or bf16 for pairs
  Int8Rows int8;              // words: null unless products are in integers
  NormParameters norm;
  std::size_t bytes = 0;

  // at: memory aligned to 64 bytes; null to ask for `bytes`.
  StagedRows(const LinearProblem& p, std::byte* at);

  // Before the first rows.
  void prepare(const LinearProblem& p) const;
  // Rows [begin, begin + count) of x, and rows of zeros up to whole steps.
  void stage(const LinearProblem& p, std::int64_t begin, std::int64_t count, Executor& executor) const;
  // The task of tile 0 over those rows.
  LinearTask task(const LinearProblem& p, std::int64_t begin, std::int64_t count) const;

 private:
  void stage_int8(const LinearProblem& p, std::int64_t i, const float* x) const;

  std::int8_t* codes_ = nullptr;  // of int8, to be written
  float *scales_ = nullptr, *totals_ = nullptr, *norm_weight_ = nullptr, *norm_bias_ = nullptr;
};

}  // namespace heddle::cpu
