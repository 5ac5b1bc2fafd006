// Launches the unfused method: three passes over a score matrix of 4 * B * H * Sq * Sk bytes.
#include <algorithm>

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/attention.h"
#include "cpu/kernels.h"

namespace heddle::cpu {
namespace {

// Pairs stored for one sequence, all heads.
std::int64_t stored(const AttentionProblem& p, const Sequence& s) { return p.H * s.q_rows * s.sk; }

std::size_t prefix_bytes(const AttentionProblem& p) {
  return static_cast<std::size_t>(round_up(2 * (p.B + 1) * 8, 64));
}

std::size_t scratch_bytes(const AttentionProblem& p) {
  return static_cast<std::size_t>(round_up(static_cast<std::int64_t>(kernels().baseline_scratch(p)), 64));
}

Refusal supports(const AttentionProblem&) { return ""; }

double estimate(const AttentionProblem& p, int workers) {
  const Kernels& k = kernels();
  const double rate = p.dtype == DType::bf16 ? k.bf16_rate : k.f32_rate;
  double pairs = 0;
  for (std::int64_t b = 0; b < p.B; ++b) pairs += static_cast<double>(stored(p, p.sequence(b)));
  return 9e-6 + pairs * (2.0 * static_cast<double>(p.D + p.Dv) + 40.0) / (rate * workers);
}

std::size_t workspace(const AttentionProblem& p, int workers) {
  std::int64_t pairs = 0;
  for (std::int64_t b = 0; b < p.B; ++b) pairs += stored(p, p.sequence(b));
  return prefix_bytes(p) + scratch_bytes(p) * static_cast<std::size_t>(workers) + static_cast<std::size_t>(pairs) * 4;
}

std::string describe(const AttentionProblem& p, int workers) {
  return text(kernels().name, ", all scores in memory, tiles of ", tile_rows(p), " rows, ", workers,
              workers == 1 ? " thread" : " threads");
}

void launch(const AttentionProblem& p, const Runtime& runtime) {
  const Kernels& k = kernels();
  Executor& executor = *runtime.executor;
  auto* memory = static_cast<std::byte*>(runtime.workspace.data);
  auto* tasks_before = reinterpret_cast<std::int64_t*>(memory);
  std::int64_t* pairs_before = tasks_before + p.B + 1;
  std::byte* scratch = memory + prefix_bytes(p);
  const std::size_t scratch_each = scratch_bytes(p);
  auto* scores = reinterpret_cast<float*>(scratch + scratch_each * static_cast<std::size_t>(executor.workers()));

  const auto tiles = [&](const Sequence& s) { return ceil_div(s.q_rows * p.G, tile_rows(p)); };
  tasks_before[0] = pairs_before[0] = 0;
  for (std::int64_t b = 0; b < p.B; ++b) {
    const Sequence s = p.sequence(b);
    tasks_before[b + 1] = tasks_before[b] + p.Hkv * tiles(s);
    pairs_before[b + 1] = pairs_before[b] + stored(p, s);
  }
  const auto pass = [&](void (*step)(const AttentionProblem&, const BaselineTask&, std::byte*)) {
    parallel_for(executor, tasks_before[p.B], [&](std::int64_t index, int worker) {
      BaselineTask task;
      task.b = std::upper_bound(tasks_before, tasks_before + p.B + 1, index) - tasks_before - 1;
      const Sequence s = p.sequence(task.b);
      const std::int64_t rest = index - tasks_before[task.b], rows = s.q_rows * p.G;
      task.kv_head = rest / tiles(s);
      task.row_begin = rest % tiles(s) * tile_rows(p);
      task.row_end = std::min(task.row_begin + tile_rows(p), rows);
      task.scores = scores + pairs_before[task.b] + task.kv_head * rows * s.sk;
      step(p, task, scratch + scratch_each * static_cast<std::size_t>(worker));
    });
  };
  pass(k.baseline_scores);
  pass(k.baseline_softmax);
  pass(k.baseline_output);
}

}  // namespace

const AttentionForwardKernel kAttentionForwardBaseline = {
    .name = "cpu_baseline",
    .method = "baseline",
    .device = Device::cpu,
    .automatic = false,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe,
    .extras = kDraftMask | kPiece | kFloat32Out | kSteps,
};

}  // namespace heddle::cpu
