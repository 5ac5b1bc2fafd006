// A linear layer, or its gradients, after its arguments were checked (src/ops/linear/arguments.cc).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <variant>

#include "heddle/linear.h"
#include "lowbit/fragments.h"
#include "lowbit/matrix_order.h"
#include "lowbit/packed.h"
#include "problem/candidate.h"

namespace heddle {

// A tensor [..., width] as rows, the last dimension contiguous.
struct RowsOf {
  std::byte* data = nullptr;  // null before there is any, too
  DType dtype = DType::f32;
  bool given = false;
  std::uint16_t alignment = 1;                           // bytes: a power of two
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
  int alignment = 256;                                 // of both, bytes: a power of two
};

// A call without bias, activation and norm; of dense weights without a format.
struct LinearExample {
  const char* format;
  WeightOrder order;
  DType dtype;
  std::int64_t M, N, K;
  bool int8_x = false;
};

// W in an order of fragments, as GPUs read them.
struct Fragments {
  lowbit::FragmentLayout layout;
  const std::byte* data = nullptr;
};

// W in 16 bits, [N, K].
struct KeptWeights {
  const std::byte* data = nullptr;
  DType dtype = DType::bf16;
};

// W as a layer has it, packed or plain.
struct LayerWeights {
  std::int64_t N = 0, K = 0;
  Device device = Device::cpu;
  lowbit::Format format;
  WeightOrder order = WeightOrder::rows16;
  bool gated = false;  // as weights are packed
  // What `order` says: panels for rows16, a matrix for matrix and matrix8, nothing for dense, else fragments.
  std::variant<std::monostate, lowbit::Panels, lowbit::Matrix, Fragments> packed;
  std::optional<KeptWeights> kept;  // beside the format's, or in its place

  const lowbit::Panels& panels() const { return std::get<lowbit::Panels>(packed); }
  const lowbit::Matrix& matrix() const { return std::get<lowbit::Matrix>(packed); }
  const Fragments& fragments() const { return std::get<Fragments>(packed); }
};

struct LinearProblem : LayerWeights {
  using Example = LinearExample;

  std::int64_t M = 0;
  std::int64_t outputs = 0;  // columns of y: N, or N / 2
  DType dtype = DType::f32;  // of x, y, bias and residual
  RowsOf x, y, residual;
  const std::byte* bias = nullptr;  // [N], or null
  Activation activation = Activation::none;
  RowNorm norm;
  bool int8_x = false, batch_invariant = false;

  bool empty() const { return M == 0 || N == 0; }  // there is nothing to write
};

struct LinearBackwardProblem {
  using Example = LinearExample;  // dx alone

  LinearProblem forward;  // without y and residual; x is not given if it is not read
  RowsOf dy, dx;          // dx is not given if it is not wanted; the others are null
  std::byte *dbias = nullptr, *dnorm_weight = nullptr, *dnorm_bias = nullptr;

  bool activated() const { return forward.activation != Activation::none; }
  bool normed() const { return forward.norm.kind != Norm::none; }
  // Of the rows after the norm.
  bool wants_rows() const { return dx.given || dnorm_weight != nullptr || dnorm_bias != nullptr; }
};

// Kernel::extras.
enum LinearExtra : unsigned {
  kNormInFront = 1,  // a norm in front of the product
};

using LinearKernel = Kernel<LinearProblem>;
using LinearBackwardKernel = Kernel<LinearBackwardProblem>;

}  // namespace heddle
