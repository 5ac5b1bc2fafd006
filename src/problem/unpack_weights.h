// unpack_weights after its arguments were checked (src/ops/linear/unpack_weights.cc).
#pragma once

#include "lowbit/formats.h"
#include "lowbit/matrix.h"
#include "problem/linear.h"

namespace heddle {

struct UnpackProblem {
  LayerWeights weights;
  lowbit::Weights out;  // [N, K]

  // Of codes and of `out`, read and written once.
  double bytes() const {
    const double code = lowbit::bits_of(weights.format.element) / 8.0;
    return static_cast<double>(weights.N) * static_cast<double>(weights.K) *
           (code + static_cast<double>(size_of(out.dtype)));
  }
};

using UnpackKernel = Kernel<UnpackProblem>;

}  // namespace heddle
