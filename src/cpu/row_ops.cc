#include "cpu/row_ops.h"

#include "cpu/kernels.h"

namespace heddle {
namespace {

using bits16 = std::uint16_t;

const RowKernels& row_kernels() { return cpu::kernels().model_rows; }

}  // namespace

void gelu(const float* x, std::int64_t count, DType dtype, void* out) {
  if (dtype == DType::f32) {
    row_kernels().gelu_f32(x, count, static_cast<float*>(out));
  } else {
    row_kernels().gelu_bf16(x, count, static_cast<bits16*>(out));
  }
}

void residual_layer_norm(float* x, const void* residual, std::int64_t rows, const LayerNormRows& norm, DType dtype,
                         void* out) {
  if (dtype == DType::f32) {
    row_kernels().layer_norm_f32(x, static_cast<const float*>(residual), rows, norm, static_cast<float*>(out));
  } else {
    row_kernels().layer_norm_bf16(x, static_cast<const bits16*>(residual), rows, norm, static_cast<bits16*>(out));
  }
}

void add_three(const void* a, const void* b, const void* c, std::int64_t count, DType dtype, float* out) {
  if (dtype == DType::f32) {
    row_kernels().add_three_f32(static_cast<const float*>(a), static_cast<const float*>(b),
                                static_cast<const float*>(c), count, out);
  } else {
    row_kernels().add_three_bf16(static_cast<const bits16*>(a), static_cast<const bits16*>(b),
                                 static_cast<const bits16*>(c), count, out);
  }
}

void accumulate(const void* x, std::int64_t count, DType dtype, float* sum) {
  if (dtype == DType::f32) {
    row_kernels().accumulate_f32(static_cast<const float*>(x), count, sum);
  } else {
    row_kernels().accumulate_bf16(static_cast<const bits16*>(x), count, sum);
  }
}

void widen(const bits16* x, std::int64_t count, float* out) { row_kernels().widen(x, count, out); }
void narrow(const float* x, std::int64_t count, bits16* out) { row_kernels().narrow(x, count, out); }

}  // namespace heddle
