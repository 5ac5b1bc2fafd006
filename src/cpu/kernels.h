// What one SIMD target offers. Each targets/<name>.cc fills one table from the same source.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/attention_problem.h"
#include "cpu/plan.h"

namespace heddle::cpu {

struct BackwardTask;
struct BaselineTask;

struct Kernels {
  const char* name;
  int group;                   // query rows of one register tile
  bool bf16_pairs;             // products of bf16 operands in bf16, two at a time, summed in f32
  double f32_rate, bf16_rate;  // FLOP/s of one core in the matrix products, for estimates

  // Scratch bytes of one worker, and one task.
  std::size_t (*forward_scratch)(const AttentionProblem&);
  void (*forward)(const AttentionProblem&, const ForwardTask&, std::byte* scratch);
  // f32 of one partial result, and the merge of `count` of them, one after the other, into o and lse.
  std::size_t (*partial_floats)(const AttentionProblem&);
  void (*merge)(const AttentionProblem&, const ForwardTask&, std::int64_t count, std::byte* scratch);

  std::size_t (*baseline_scratch)(const AttentionProblem&);
  void (*baseline_scores)(const AttentionProblem&, const BaselineTask&, std::byte* scratch);
  void (*baseline_softmax)(const AttentionProblem&, const BaselineTask&, std::byte* scratch);
  void (*baseline_output)(const AttentionProblem&, const BaselineTask&, std::byte* scratch);

  std::size_t (*backward_scratch)(const AttentionBackwardProblem&);
  void (*backward)(const AttentionBackwardProblem&, const BackwardTask&, std::byte* scratch);
};

// The target in use; targets built into the library that this processor can run, best first.
const Kernels& kernels();
const std::vector<const Kernels*>& available_kernels();

}  // namespace heddle::cpu
