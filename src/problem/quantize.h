// Quantisation after its arguments were checked (src/ops/lowbit.cc): what reaches the reference and the kernels.
#pragma once

#include "heddle/lowbit.h"
#include "lowbit/matrix.h"

namespace heddle::lowbit {

struct QuantizeProblem {
  Weights weights;
  Matrix out;
  ScaleRule rule = ScaleRule::plain;
  const float* importance = nullptr;  // [K], contiguous, or null
  float global_scale = 0.0f;          // of every block, where the format has one; set before kernels run
};

}  // namespace heddle::lowbit
