// Quantisation and its undoing after their arguments were checked (src/ops/lowbit/lowbit.cc).
#pragma once

#include <cstdint>
#include <optional>

#include "heddle/lowbit.h"
#include "lowbit/matrix.h"
#include "problem/candidate.h"

namespace heddle::lowbit {

// What reaches the kernels of a quantisation.
struct QuantizeProblem {
  Weights weights;
  Matrix out;
  ScaleRule rule = ScaleRule::plain;
  const float* importance = nullptr;  // [K], contiguous, or null
  float global_scale = 0.0f;          // of every block, where the format has one; 0 in a call: the matrix's own
};

// Values that a quantisation cannot serve, which nobody knows before they are read.
struct BadValues {
  struct Importance {
    std::int64_t column;
    float value;
  };
  struct Weight {
    std::int64_t row, column;
    float value;
  };
  std::optional<Importance> importance;  // the first that is not finite or is negative; looked for on a GPU alone
  std::optional<Weight> weight;          // the first that is not finite; where all are, the first beyond weight_limit()
};

// What candidates get.
struct QuantizeCall {
  QuantizeProblem problem;
  Device device = Device::cpu;
  BadValues* found = nullptr;  // on the host; written before launch() returns. null where nothing is launched

  double bytes() const;  // read and written once
};

struct DequantizeProblem {
  Matrix matrix;
  Weights out;
  Device device = Device::cpu;

  double bytes() const;
};

using QuantizeKernel = Kernel<QuantizeCall>;
using DequantizeKernel = Kernel<DequantizeProblem>;

// On the CPU, between the largest |weight| (NaN above infinity) and the encoding: the problem to encode, which has its
// global scale. Nothing where a weight cannot be served, which `found` then has.
std::optional<QuantizeProblem> encodable(const QuantizeCall& call, float largest);

}  // namespace heddle::lowbit
