// Sums of gated branches, the end of native sparse attention, after their arguments were checked (src/ops/nsa/nsa.h).
#pragma once

#include <cstdint>

#include "problem/attention.h"
#include "problem/candidate.h"

namespace heddle {

// out = the sum of gate_n o_n over the branches; packed rows are one batch.
struct GateProblem {
  static constexpr int kMost = 3;  // branches

  std::int64_t B = 0, S = 0, H = 0, Dv = 0;
  int count = 0;  // of branches
  Device device = Device::cpu;
  Operand o[kMost];
  Plane gate[kMost];  // f32 [b, h, i]
  Operand out;        // d_out in a backward

  // That a call moves at least.
  double bytes() const {
    return static_cast<double>(B * S * H * Dv) * (count + 1) * static_cast<double>(size_of(o[0].dtype));
  }
};

// d_o_n = gate_n d_out, d_gate_n = d_out . o_n; each may be absent.
struct GateBackwardProblem : GateProblem {
  Operand d_o[kMost];
  Plane d_gate[kMost];
};

using GateKernel = Kernel<GateProblem>;
using GateBackwardKernel = Kernel<GateBackwardProblem>;

}  // namespace heddle
