// Linear layers y = x W^T + b over blocks of rows, on top of a matrix library. One call runs on the calling thread
// alone: the encoder spreads row blocks over its executor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "heddle/tensor.h"

namespace heddle {

// Rows of one call at most, and the step that row counts are rounded up to: x and y must hold that many rows, but rows
// beyond the count may contain anything.
constexpr std::int64_t kLinearRows = 64;
constexpr std::int64_t kLinearRowStep = 16;
constexpr std::int64_t whole_steps(std::int64_t rows) {
  return (rows + kLinearRowStep - 1) / kLinearRowStep * kLinearRowStep;
}

// The matrix library and its version, "oneDNN 2.6.3", loaded if no call has done so before. Throws RuntimeError where
// heddle was built without one, or where it cannot be loaded, with what is missing.
std::string matrix_library();

class FloatLinear {
 public:
  // weight [out, in] and bias [out], f32, are copied: repacked, in `dtype` (f32 or bf16), for x of that dtype. y has
  // `y_dtype` (f32, or `dtype`); products are summed in f32 and the bias is kept in f32. Throws RuntimeError as
  // matrix_library() does.
  FloatLinear(const float* weight, const float* bias, std::int64_t out, std::int64_t in, DType dtype, DType y_dtype);
  FloatLinear(FloatLinear&&) noexcept;
  FloatLinear& operator=(FloatLinear&&) noexcept;
  ~FloatLinear();

  // Bytes of weight and bias as held in memory.
  std::size_t weight_bytes() const;
  // Scratch bytes of one call, to be aligned to 64 bytes.
  std::size_t scratch_bytes() const;
  // y [rows, out] = x [rows, in] W^T + b, contiguous; 1 <= rows <= kLinearRows. A row's result does not depend on the
  // number of rows. May be called by many threads at once, each with its own scratch.
  void run(const void* x, void* y, std::int64_t rows, void* scratch) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace heddle
