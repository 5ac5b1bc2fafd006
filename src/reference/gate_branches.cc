#include "reference/gate_branches.h"

#include "core/dtypes.h"

namespace heddle::reference {
namespace {

using std::int64_t;

double element(const Operand& x, int64_t b, int64_t i, int64_t h, int64_t d) {
  return load_element(x.at(b, i, h), x.dtype, d * x.stride_d);
}
double gate_of(const GateProblem& p, int n, int64_t b, int64_t i, int64_t h) {
  return p.gate[n].as<const float>()[p.gate[n].offset(b, h, i)];
}

// visit(b, i, h) of each row of a head, in the order of contiguous memory.
template <class Visit>
void each_row(const GateProblem& p, const Visit& visit) {
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t i = 0; i < p.S; ++i) {
      for (int64_t h = 0; h < p.H; ++h) visit(b, i, h);
    }
  }
}

void store(const GateProblem& p, const std::vector<double>& values, const Operand& x) {
  std::size_t at = 0;
  each_row(p, [&](int64_t b, int64_t i, int64_t h) {
    for (int64_t d = 0; d < p.Dv; ++d, ++at) {
      store_element(x.at(b, i, h), x.dtype, d * x.stride_d, static_cast<float>(values[at]));
    }
  });
}

void launch_backward(const GateBackwardProblem& p, const Runtime&) {
  for (int n = 0; n < p.count; ++n) {
    const GateGradients found = gate_branches_backward(p, n);
    if (p.d_o[n]) store(p, found.d_o, p.d_o[n]);
    if (!p.d_gate[n]) continue;
    std::size_t at = 0;
    each_row(p, [&](int64_t b, int64_t i, int64_t h) {
      p.d_gate[n].as<float>()[p.d_gate[n].offset(b, h, i)] = static_cast<float>(found.d_gate[at++]);
    });
  }
}

template <class Problem>
std::string describe(const Problem&, int) {
  return "plain loops in double precision, on one thread";
}

}  // namespace

std::vector<double> gate_branches(const GateProblem& p) {
  std::vector<double> out;
  each_row(p, [&](int64_t b, int64_t i, int64_t h) {
    for (int64_t d = 0; d < p.Dv; ++d) {
      double sum = 0;
      for (int n = 0; n < p.count; ++n) sum += gate_of(p, n, b, i, h) * element(p.o[n], b, i, h, d);
      out.push_back(sum);
    }
  });
  return out;
}

GateGradients gate_branches_backward(const GateBackwardProblem& p, int n) {
  GateGradients out;
  each_row(p, [&](int64_t b, int64_t i, int64_t h) {
    double dot = 0;
    for (int64_t d = 0; d < p.Dv; ++d) {
      const double d_out = element(p.out, b, i, h, d);
      out.d_o.push_back(gate_of(p, n, b, i, h) * d_out);
      dot += d_out * element(p.o[n], b, i, h, d);
    }
    out.d_gate.push_back(dot);
  });
  return out;
}

const GateKernel kGateBranches = {
    .name = "reference",
    .method = "reference",
    .device = Device::cpu,
    .automatic = false,
    .supports = serves_all,
    .estimate = [](const GateProblem& p, int) { return p.bytes() / 1e7; },
    .workspace = no_workspace,
    .launch = [](const GateProblem& p, const Runtime&) { store(p, gate_branches(p), p.out); },
    .describe = describe<GateProblem>,
};

const GateBackwardKernel kGateBranchesBackward = {
    .name = "reference",
    .method = "reference",
    .device = Device::cpu,
    .automatic = false,
    .supports = serves_all,
    .estimate = [](const GateBackwardProblem& p, int) { return 2 * p.bytes() / 1e7; },
    .workspace = no_workspace,
    .launch = launch_backward,
    .describe = describe<GateBackwardProblem>,
};

}  // namespace heddle::reference
