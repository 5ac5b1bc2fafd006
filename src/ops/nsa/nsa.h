// What bindings and tests call beside the public API of pooled keys and the choice of blocks.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/check.h"
#include "heddle/nsa.h"
#include "problem/gate_branches.h"
#include "problem/nsa_step.h"
#include "problem/pool.h"
#include "problem/select_blocks.h"

namespace heddle {

// Throw Error. pooled_name, blocks_name: what errors call the result, which Python's callers know as out.
PoolProblem checked_pool_problem(const Check& check, const TensorView& x, const TensorView& pooled,
                                 const PoolOptions& options, const char* pooled_name = "pooled");
PoolBackwardProblem checked_pool_backward_problem(const Check& check, const TensorView& d_pooled, const TensorView& dx,
                                                  const PoolOptions& options);
SelectProblem checked_select_problem(const Check& check, const TensorView& q, const TensorView& k_pooled,
                                     const TensorView& lse, const TensorView& blocks, const SelectOptions& options,
                                     const char* blocks_name = "blocks");

void pool_keys(const TensorView& x, const TensorView& pooled, const PoolOptions& options, const Runtime& runtime,
               const char* pooled_name);

// select_blocks() with scratch that is asked for when the kernel is chosen (ops/attention/attention.h).
void select_blocks_with(const TensorView& q, const TensorView& k_pooled, const TensorView& lse,
                        const TensorView& blocks, const SelectOptions& options, const Runtime& runtime,
                        const std::function<Workspace(std::size_t bytes)>& scratch, const char* blocks_name = "blocks");

NsaStepProblem checked_nsa_step_problem(const Check& check, const TensorView& q, const TensorView& k_new,
                                        const TensorView& v_new, const NsaCache& cache, const NsaGates& gates,
                                        const TensorView& out, const NsaStepOptions& options);
// nsa_step() with scratch that is asked for when the kernel is chosen.
void nsa_step_with(const TensorView& q, const TensorView& k_new, const TensorView& v_new, const NsaCache& cache,
                   const NsaGates& gates, const TensorView& out, const NsaStepOptions& options, const Runtime& runtime,
                   const std::function<Workspace(std::size_t bytes)>& scratch);

// A branch of native sparse attention and its gate: it adds gate * o to the result.
struct GatedBranch {
  TensorView o;     // [B, Sq, H, Dv], packed [total_q, H, Dv]: f32, f16 or bf16
  TensorView gate;  // [B, Sq, H], packed [total_q, H]: f32
};

// What joins the branches on GPUs, where elementwise operations one after the other would move each branch several
// times: out = the sum of gate_n o_n, of one to three branches of one dtype, which out has too; any strides. Sums are
// f32, in the order of the branches, and rounded once. Reads and writes each element once; takes no workspace. On the
// CPU the reference alone.
void gate_branches(std::span<const GatedBranch> branches, const TensorView& out, const Runtime& runtime = {},
                   const std::string& force = {});
// gradients: d_o_n = gate_n d_out and d_gate_n = d_out . o_n, each of which may be absent.
void gate_branches_backward(std::span<const GatedBranch> branches, const TensorView& d_out,
                            std::span<const GatedBranch> gradients, const Runtime& runtime = {},
                            const std::string& force = {});
std::vector<Candidate> explain_gate_branches(std::span<const GatedBranch> branches, const TensorView& out,
                                             const Runtime& runtime = {}, const std::string& force = {});
std::vector<Candidate> explain_gate_branches_backward(std::span<const GatedBranch> branches, const TensorView& d_out,
                                                      std::span<const GatedBranch> gradients,
                                                      const Runtime& runtime = {}, const std::string& force = {});
GateProblem checked_gate_problem(const Check& check, std::span<const GatedBranch> branches, const TensorView& out);
GateBackwardProblem checked_gate_backward_problem(const Check& check, std::span<const GatedBranch> branches,
                                                  const TensorView& d_out, std::span<const GatedBranch> gradients);

}  // namespace heddle
