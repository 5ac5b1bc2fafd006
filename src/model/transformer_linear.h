// A linear layer of a Transformer in the precision that it was given: on the CPU float32 or bfloat16 on the matrix
// library, or low-bit weights through linear_forward, which has bias, activation and residual in its epilogue; on a GPU
// all through linear_forward, weights that are not low-bit in order dense. A call on the CPU runs on the calling
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/linear_kernels.h"
#include "heddle/linear.h"
#include "heddle/lowbit.h"
#include "heddle/runtime.h"
#include "model/linear.h"
#include "model/weight_memory.h"

namespace heddle {

// What y is, of activations x of the model's dtype.
enum class LinearRole : std::uint8_t {
  project,   // x W^T + b, of the model's dtype
  activate,  // activation(x W^T + b) of the model's dtype, from low-bit weights; else x W^T + b in f32
  sum,       // x W^T + b + residual in f32, from low-bit weights, unless there is none; else without the residual
  // On a GPU the last two are what low-bit weights give, of the model's dtype.
};

class TransformerLinear {
 public:
  struct Shape {
    std::int64_t out = 0, in = 0;
    DType dtype = DType::f32;  // of the model
    LinearRole role = LinearRole::project;
    Activation activation = Activation::none;  // of role activate; swiglu has out / 2 columns
    Device device = Device::cpu;
  };
  // weight [out, in], bias [out] or null. `precision`: f32 or bf16, of the products; on a GPU the model's dtype.
  // norm: of x in front of the product; but for the matrix library its parameters are rounded to the model's dtype.
  TransformerLinear(const Shape& shape, const float* weight, const float* bias, DType precision,
                    const cpu::NormParameters& norm = {});
  TransformerLinear(const Shape& shape, const lowbit::QuantizedMatrix& weight, const float* bias,
                    const cpu::NormParameters& norm = {});

  // Whether activation and residual are in the epilogue.
  bool fused() const { return library_ == nullptr; }
  // "float32", "bfloat16", "float16" or the format's name.
  const std::string& format() const { return format_; }
  const Shape& shape() const { return shape_; }
  // Columns of y from low-bit weights, or on a GPU.
  std::int64_t outputs() const { return shape_.activation == Activation::swiglu ? shape_.out / 2 : shape_.out; }
  std::size_t weight_bytes() const;
  const PackingError& packing_error() const { return packing_error_; }
  // On the CPU.
  std::size_t scratch_bytes() const { return library_at_ + library_bytes_; }
  // Rows of y are y_stride elements apart where the role is project, else contiguous. residual: of role sum, or null. 1
  // <= rows <= kLinearRows; x, y and residual have room for rows up to a multiple of kLinearRowStep, with anything in
  // them. A row's result does not depend on the others.
  void run(const std::byte* x, const std::byte* residual, std::byte* y, std::int64_t y_stride, std::int64_t rows,
           std::byte* scratch) const;

  // Rows on a GPU, `stride` elements apart: a multiple of 8, and so many bytes that each begins at a multiple of 16.
  struct GpuRows {
    std::byte* data = nullptr;
    std::int64_t stride = 0;
  };
  // Any number of rows, as they lie; y has outputs() columns. residual: of role sum; may be y.
  std::size_t gpu_workspace(std::int64_t rows) const;
  void run_on_gpu(const GpuRows& x, const GpuRows& residual, const GpuRows& y, std::int64_t rows,
                  const Runtime& runtime) const;

 private:
  void run_library(const std::byte* x, std::byte* y, std::int64_t y_stride, std::int64_t rows,
                   std::byte* scratch) const;
  void run_low_bit(const std::byte* x, const std::byte* residual, std::byte* y, std::int64_t y_stride,
                   std::int64_t rows, std::byte* scratch) const;
  LinearOptions packed_options() const;
  LinearOptions gpu_options(const GpuRows& residual, std::int64_t rows) const;
  TensorView on_gpu(const GpuRows& of, std::int64_t rows, std::int64_t columns) const;
  void hold(const float* bias);
  void hold(const cpu::NormParameters& norm, DType dtype);
  cpu::NormParameters library_norm() const;

  Shape shape_;
  std::string format_;
  // One of both.
  std::unique_ptr<FloatLinear> library_;
  DType precision_ = DType::f32, library_y_ = DType::f32;
  PackedWeights packed_;
  PackingError packing_error_;
  WeightMemory packed_data_, bias_;
  Norm norm_ = Norm::none;
  double norm_eps_ = 0;
  WeightMemory norm_weight_, norm_bias_;  // [in], of f32 for the library, else of the model's dtype; or empty

  // Scratch: x normalised or in another precision, y on its way, and what the product itself takes.
  std::size_t y_at_ = 0, library_at_ = 0, library_bytes_ = 0;
};

}  // namespace heddle
