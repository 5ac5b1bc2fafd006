// Sums of gated branches and their gradients: check, choose, launch.
#include <string>
#include <vector>

#include "ops/attention/arguments.h"
#include "ops/attention/problem_builder.h"
#include "ops/nsa/choice.h"
#include "ops/nsa/nsa.h"
#include "problem/operand_of.h"

namespace heddle {
namespace {

constexpr std::int64_t kMaxHeadSize = 256;
constexpr const char *kO[] = {"os[0]", "os[1]", "os[2]"}, *kGate[] = {"gates[0]", "gates[1]", "gates[2]"},
                     *kDo[] = {"d_os[0]", "d_os[1]", "d_os[2]"}, *kDGate[] = {"d_gates[0]", "d_gates[1]", "d_gates[2]"};

class GateChecks {
 public:
  GateChecks(const Check& check, std::span<const GatedBranch> branches) : check_(check), branches_(branches) {}

  void read(GateProblem& p) const {
    check_.require(!branches_.empty() && branches_.size() <= GateProblem::kMost, "there are ", branches_.size(),
                   " branches: there must be 1 to ", GateProblem::kMost);
    const TensorView& o = first();
    check_.require(o.given(), kO[0], " is missing");
    check_.require(o.rank == 3 || o.rank == 4, kO[0], " has ", o.rank,
                   " dimensions: it must be [B, Sq, H, Dv], or packed [total_q, H, Dv]");
    check_.require(o.dtype == DType::f32 || o.dtype == DType::f16 || o.dtype == DType::bf16, kO[0], " is ",
                   name_of(o.dtype), ": it must be float32, float16 or bfloat16");
    const bool packed = o.rank == 3;
    p.B = packed ? 1 : o.shape[0];
    p.S = o.shape[o.rank - 3];
    p.H = o.shape[o.rank - 2];
    p.Dv = o.shape[o.rank - 1];
    check_.require(p.Dv >= 1 && p.Dv <= kMaxHeadSize, kO[0], " has head size ", p.Dv, ": it must be from 1 to ",
                   kMaxHeadSize);
    p.device = o.device;
    p.count = static_cast<int>(branches_.size());
    for (int n = 0; n < p.count; ++n) {
      p.o[n] = rows(branches_[n].o, kO[n]);
      p.gate[n] = per_row(branches_[n].gate, kGate[n]);
    }
  }
  Operand rows(const TensorView& view, const char* name) const {
    check_.tensor(view, name, first().dtype, first().device, first().rank, kO[0]);
    check_.require(view.shape == first().shape, name, " is ", view, ": it must have the shape of ", kO[0], ", ",
                   first());
    return operand_of(view);
  }
  // [B, Sq, H], packed [total_q, H].
  Plane per_row(const TensorView& view, const char* name) const {
    const TensorView& o = first();
    check_.tensor(view, name, DType::f32, o.device, o.rank - 1, kO[0]);
    bool right = true;
    for (int i = 0; i < o.rank - 1; ++i) right &= view.shape[i] == o.shape[i];
    check_.require(right, name, " is ", view, ": it must have a number for each row and head of ", kO[0], ", ", o);
    Plane plane = plane_of(view);
    plane.stride_b = o.rank == 3 ? 0 : view.stride[0];
    plane.stride_i = view.stride[o.rank - 3];
    plane.stride_h = view.stride[o.rank - 2];
    return plane;
  }
  void add_inputs(std::vector<Named>& inputs) const {
    for (std::size_t n = 0; n < branches_.size(); ++n) {
      inputs.emplace_back(kO[n], &branches_[n].o);
      inputs.emplace_back(kGate[n], &branches_[n].gate);
    }
  }

 private:
  const TensorView& first() const { return branches_[0].o; }

  const Check& check_;
  const std::span<const GatedBranch> branches_;
};

}  // namespace

GateProblem checked_gate_problem(const Check& check, std::span<const GatedBranch> branches, const TensorView& out) {
  const GateChecks checks(check, branches);
  GateProblem p;
  checks.read(p);
  p.out = checks.rows(out, "out");
  check.not_overlapping(out, "out");
  std::vector<Named> inputs;
  checks.add_inputs(inputs);
  const Named outputs[] = {{"out", &out}};
  check_apart(check, outputs, inputs);
  return p;
}

GateBackwardProblem checked_gate_backward_problem(const Check& check, std::span<const GatedBranch> branches,
                                                  const TensorView& d_out, std::span<const GatedBranch> gradients) {
  const GateChecks checks(check, branches);
  GateBackwardProblem p;
  checks.read(p);
  p.out = checks.rows(d_out, "d_out");
  check.require(gradients.size() == branches.size(), "there are ", gradients.size(), " gradients and ", branches.size(),
                " branches: there must be as many");
  std::vector<Named> outputs, inputs = {{"d_out", &d_out}};
  checks.add_inputs(inputs);
  for (int n = 0; n < p.count; ++n) {
    const auto& [d_o, d_gate] = gradients[n];
    if (d_o.given()) {
      p.d_o[n] = checks.rows(d_o, kDo[n]);
      check.not_overlapping(d_o, kDo[n]);
      outputs.emplace_back(kDo[n], &d_o);
    }
    if (d_gate.given()) {
      p.d_gate[n] = checks.per_row(d_gate, kDGate[n]);
      check.not_overlapping(d_gate, kDGate[n]);
      outputs.emplace_back(kDGate[n], &d_gate);
    }
  }
  check_apart(check, outputs, inputs);
  return p;
}

void gate_branches(std::span<const GatedBranch> branches, const TensorView& out, const Runtime& runtime,
                   const std::string& force) {
  const Check check("gate_branches");
  const GateProblem p = checked_gate_problem(check, branches, out);
  run(check, "gate_branches", choose(check, p, wish_of<GateProblem>(check, force), workers_of(runtime)), p, runtime, 0);
}

void gate_branches_backward(std::span<const GatedBranch> branches, const TensorView& d_out,
                            std::span<const GatedBranch> gradients, const Runtime& runtime, const std::string& force) {
  const Check check("gate_branches_backward");
  const GateBackwardProblem p = checked_gate_backward_problem(check, branches, d_out, gradients);
  run(check, "gate_branches_backward",
      choose(check, p, wish_of<GateBackwardProblem>(check, force), workers_of(runtime)), p, runtime, 0);
}

std::vector<Candidate> explain_gate_branches(std::span<const GatedBranch> branches, const TensorView& out,
                                             const Runtime& runtime, const std::string& force) {
  const Check check("explain_gate_branches", Data::to_come);
  return explained(checked_gate_problem(check, branches, out), wish_of<GateProblem>(check, force), workers_of(runtime));
}

std::vector<Candidate> explain_gate_branches_backward(std::span<const GatedBranch> branches, const TensorView& d_out,
                                                      std::span<const GatedBranch> gradients, const Runtime& runtime,
                                                      const std::string& force) {
  const Check check("explain_gate_branches_backward", Data::to_come);
  return explained(checked_gate_backward_problem(check, branches, d_out, gradients),
                   wish_of<GateBackwardProblem>(check, force), workers_of(runtime));
}

}  // namespace heddle
