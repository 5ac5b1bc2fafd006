// A linear layer after its arguments were checked (src/ops/linear_arguments.cc), and how its kernels present
// themselves.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "heddle/linear.h"
#include "heddle/runtime.h"
#include "lowbit/packed.h"

namespace heddle {

// A tensor [..., width] as rows, the last dimension contiguous.
struct RowsOf {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::array<std::int64_t, 3> shape{1, 1, 1}, stride{};  // of the leading dimensions, elements

  std::byte* row(std::int64_t m) const {
    const std::int64_t last = m % shape[2], rest = m / shape[2];
    const std::int64_t offset = last * stride[2] + rest % shape[1] * stride[1] + rest / shape[1] * stride[0];
    return data + offset * static_cast<std::int64_t>(size_of(dtype));
  }
};

// The norm in front of the product.
struct RowNorm {
  Norm kind = Norm::none;
  double eps = 0;
  const std::byte *weight = nullptr, *bias = nullptr;  // [K] of x's dtype; null: ones, zeros
};

struct LinearProblem {
  std::int64_t M = 0, N = 0, K = 0;
  std::int64_t outputs = 0;  // columns of y: N, or N / 2
  DType dtype = DType::f32;  // of x, y, bias and residual
  Device device = Device::cpu;
  lowbit::Panels weights;
  RowsOf x, y, residual;            // residual.data: null if there is none
  const std::byte* bias = nullptr;  // [N], or null
  Activation activation = Activation::none;
  RowNorm norm;
  bool int8_x = false, batch_invariant = false;
};

struct LinearKernel {
  const char* name;    // what `force` takes
  const char* method;  // "linear", "reference"
  Device device;
  bool automatic;                                         // false: runs only when asked for by name
  std::string (*supports)(const LinearProblem&);          // empty, or the sentence that says why not
  double (*estimate)(const LinearProblem&, int workers);  // seconds
  std::size_t (*workspace)(const LinearProblem&, int workers);
  void (*launch)(const LinearProblem&, const Runtime&);  // runtime.executor and workspace are set and large enough
  bool norms = false;                                    // takes a norm in front of the product
};

}  // namespace heddle
