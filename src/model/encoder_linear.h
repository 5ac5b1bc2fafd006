// A linear layer of the encoder in the precision that it was given: on the CPU float32 or bfloat16 on the matrix
// library, or low-bit weights through linear_forward, which has bias, GELU and residual in its epilogue; on a GPU all
// through linear_forward, weights that are not low-bit in order dense. A call on the CPU runs on the calling thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "heddle/linear.h"
#include "heddle/lowbit.h"
#include "heddle/runtime.h"
#include "model/linear.h"
#include "model/weight_memory.h"

namespace heddle {

// What y is, of activations x of the encoder's dtype.
enum class LinearRole : std::uint8_t {
  project,  // x W^T + b, of the encoder's dtype
  gelu,     // gelu(x W^T + b) of the encoder's dtype, from low-bit weights; else x W^T + b in f32
  sum,      // x W^T + b + residual in f32, from low-bit weights; else without the residual
  // On a GPU the last two are what low-bit weights give, of the encoder's dtype.
};

class EncoderLinear {
 public:
  struct Shape {
    std::int64_t out = 0, in = 0;
    DType dtype = DType::f32;  // of the encoder
    LinearRole role = LinearRole::project;
    Device device = Device::cpu;
  };
  // weight [out, in], bias [out]. `precision`: f32 or bf16, of the products; on a GPU the encoder's dtype.
  EncoderLinear(const Shape& shape, const float* weight, const float* bias, DType precision);
  EncoderLinear(const Shape& shape, const lowbit::QuantizedMatrix& weight, const float* bias);

  // Whether activation and residual are in the epilogue.
  bool fused() const { return library_ == nullptr; }
  // "float32", "bfloat16", "float16" or the format's name.
  const std::string& format() const { return format_; }
  const Shape& shape() const { return shape_; }
  std::size_t weight_bytes() const;
  // On the CPU.
  std::size_t scratch_bytes() const { return library_at_ + library_bytes_; }
  // Rows of y are y_stride elements apart where the role is project, else contiguous. residual: of role sum. 1 <= rows
  // <= kLinearRows; x, y and residual have room for rows up to a multiple of kLinearRowStep, with anything in them. A
  // row's result does not depend on the others.
  void run(const std::byte* x, const std::byte* residual, std::byte* y, std::int64_t y_stride, std::int64_t rows,
           std::byte* scratch) const;

  // On a GPU: any number of rows, contiguous but for y; residual may be y. The pointer that workspace is asked with is
  // not read.
  std::size_t gpu_workspace(const std::byte* x, std::int64_t rows) const;
  void run_on_gpu(const std::byte* x, const std::byte* residual, std::byte* y, std::int64_t y_stride, std::int64_t rows,
                  const Runtime& runtime) const;

 private:
  void run_library(const std::byte* x, std::byte* y, std::int64_t y_stride, std::int64_t rows,
                   std::byte* scratch) const;
  void run_low_bit(const std::byte* x, const std::byte* residual, std::byte* y, std::int64_t y_stride,
                   std::int64_t rows, std::byte* scratch) const;
  LinearOptions packed_options() const;
  void hold(const float* bias);

  Shape shape_;
  std::string format_;
  // One of both.
  std::unique_ptr<Linear> library_;
  DType precision_ = DType::f32, library_y_ = DType::f32;
  PackedWeights packed_;
  WeightMemory packed_data_, bias_;

  // Scratch: x in another precision, y on its way, and what the product itself takes.
  std::size_t y_at_ = 0, library_at_ = 0, library_bytes_ = 0;
};

// Queries, keys and values, beside each other in rows of 3 * hidden: as one product where all three are in the
// encoder's own precision (on a GPU: one part), else as three.
class EncoderProjections {
 public:
  EncoderProjections(Linear together, DType dtype);
  explicit EncoderProjections(std::vector<EncoderLinear> parts);

  // Of part 0, 1 or 2.
  const std::string& format(int part) const;
  std::size_t weight_bytes(int part) const;
  std::size_t weight_bytes() const;
  std::size_t scratch_bytes() const;
  void run(const std::byte* x, std::byte* y, std::int64_t rows, std::byte* scratch) const;
  // On a GPU.
  std::size_t gpu_workspace(const std::byte* x, std::int64_t rows) const;
  void run_on_gpu(const std::byte* x, std::byte* y, std::int64_t rows, const Runtime& runtime) const;

 private:
  const EncoderLinear& part(int index) const {
    return parts_[parts_.size() == 1 ? 0 : static_cast<std::size_t>(index)];
  }

  std::unique_ptr<Linear> together_;
  std::string format_;
  std::vector<EncoderLinear> parts_;
};

}  // namespace heddle
