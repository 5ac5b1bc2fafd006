// Launches attention over lists on the CPU. Each task gathers the rows of a chunk block by block; how rows are cut into
// chunks moves work between workers without changing a bit.
#include "cpu/sparse.h"

#include <algorithm>

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/attention.h"
#include "cpu/kernels.h"
#include "cpu/key_gradients.h"
#include "problem/attended_pairs.h"

namespace heddle::cpu {
namespace {

constexpr std::int64_t kLeastRows = 64;

// Positions of a chunk: as many as fill the lanes some times over for each block that they list, so that packing the
// block does not count, and few enough that their running sums stay in a core's cache.
std::int64_t chunk_rows(const AttentionProblem& p, const KeyLists& lists) {
  constexpr std::int64_t kMost = 4096, kCachedFloats = 1 << 18, kRowsOfBlock = 96;
  const std::int64_t blocks = std::max<std::int64_t>(1, ceil_div(p.Sk, lists.block_size));
  const std::int64_t listed = p.G * std::clamp<std::int64_t>(lists.typical, 1, blocks);
  const std::int64_t cached = kCachedFloats / (p.G * (p.D + p.Dv)), filling = ceil_div(kRowsOfBlock * blocks, listed);
  const std::int64_t rows = std::clamp(std::max(cached, filling), kLeastRows, kMost);
  return std::min(rows, std::max<std::int64_t>(p.Sq, 1));
}

// Forward: fewer where there would be less than two chunks for a worker.
std::int64_t forward_rows(const SparseProblem& p, int workers) {
  const std::int64_t heads = std::max<std::int64_t>(1, p.B * p.Hkv);
  return std::min(chunk_rows(p, p.lists), std::max(kLeastRows, ceil_div(p.Sq * heads, 2 * workers)));
}

std::size_t scratch_bytes(const SparseProblem& p, int workers) {
  return static_cast<std::size_t>(
      round_up(static_cast<std::int64_t>(kernels().sparse_scratch(p, forward_rows(p, workers))), 64));
}

Refusal supports(const SparseProblem& p) {
  if (p.dtype == DType::f8e4m3) return "it takes queries in float32, float16 and bfloat16, not float8_e4m3fn";
  if (p.bias || p.mask) return "it takes no bias and no mask beside lists";
  if (p.dropout.p > 0) return "it has no dropout";
  return "";
}

// Pairs that are multiplied, at most.
double pairs_of(const AttentionProblem& p, const KeyLists& lists) {
  const double heads = static_cast<double>(p.B * p.H);
  const double listed = static_cast<double>(p.Sq) * static_cast<double>(lists.typical * lists.block_size);
  return heads * std::min(attended_pairs(p), listed);
}
double rate_of(const AttentionProblem& p) { return p.dtype == DType::bf16 ? kernels().bf16_rate : kernels().f32_rate; }

// Products of gathered rows, beside those of rows that lie side by side (docs/sparse.md, speed).
constexpr double kGathered = 0.65, kGatheredBackward = 0.6;

double estimate(const SparseProblem& p, int workers) {
  const double flops = 2.0 * static_cast<double>(p.D + p.Dv) + 16.0;
  return 3e-6 + pairs_of(p, p.lists) * flops / (kGathered * rate_of(p) * workers);
}

std::size_t workspace(const SparseProblem& p, int workers) {
  return scratch_bytes(p, workers) * static_cast<std::size_t>(workers);
}

std::string describe(const SparseProblem& p, int workers) {
  return text(kernels().name, ", chunks of ", forward_rows(p, workers), " rows gathered by blocks of ",
              p.lists.block_size, " keys, ", workers, workers == 1 ? " thread" : " threads");
}

void launch(const SparseProblem& p, const Runtime& runtime) {
  const Kernels& k = kernels();
  Executor& executor = *runtime.executor;
  const std::int64_t rows = forward_rows(p, executor.workers()), chunks = ceil_div(p.Sq, rows);
  const std::size_t each = scratch_bytes(p, executor.workers());
  auto* memory = static_cast<std::byte*>(runtime.workspace.data);
  parallel_for(executor, p.B * p.Hkv * chunks, [&](std::int64_t index, int worker) {
    // The last rows first: under a causal mask they cost most.
    SparseTask task{.b = index / (p.Hkv * chunks), .kv_head = index / chunks % p.Hkv};
    const std::int64_t stored = p.sequence(task.b).q_rows, chunk = chunks - 1 - index % chunks;
    task.row_begin = chunk * rows;
    task.row_end = std::min(task.row_begin + rows, stored);
    if (task.row_begin < task.row_end) k.sparse_forward(p, task, memory + each * static_cast<std::size_t>(worker));
  });
}

using Backward = SparseBackwardProblem;

// Chunks are a matter of the problem alone: sums of dK and dV are added up chunk by chunk.
KeyGradients key_gradients(const Backward& p) { return {p, ceil_div(p.Sq, chunk_rows(p, p.lists))}; }

std::size_t backward_scratch(const Backward& p) {
  const auto bytes = static_cast<std::int64_t>(kernels().sparse_backward_scratch(p, chunk_rows(p, p.lists)));
  return static_cast<std::size_t>(round_up(bytes, 64));
}

Refusal supports_backward(const Backward& p) {
  if (p.bias || p.mask) return "it takes no bias and no mask beside lists";
  if (p.dropout.p > 0) return "it has no dropout";
  if (p.alibi || p.softcap > 0) return "it has no gradients with ALiBi or softcap";
  return "";
}

double estimate_backward(const Backward& p, int workers) {
  const double flops = 6.0 * static_cast<double>(p.D) + 4.0 * static_cast<double>(p.Dv) + 24.0;
  return 6e-6 + pairs_of(p, p.lists) * flops / (kGatheredBackward * rate_of(p) * workers);
}

std::size_t workspace_backward(const Backward& p, int workers) {
  return backward_scratch(p) * static_cast<std::size_t>(workers) + key_gradients(p).bytes(workers);
}

std::string describe_backward(const Backward& p, int workers) {
  return text(kernels().name, ", chunks of ", chunk_rows(p, p.lists), " rows gathered by blocks of ",
              p.lists.block_size, " keys, ", key_gradients(p).describe(), ", ", workers,
              workers == 1 ? " thread" : " threads");
}

void launch_backward(const Backward& p, const Runtime& runtime) {
  const Kernels& k = kernels();
  Executor& executor = *runtime.executor;
  auto* memory = static_cast<std::byte*>(runtime.workspace.data);
  const std::size_t each = backward_scratch(p);
  const auto scratch = [&](int worker) { return memory + each * static_cast<std::size_t>(worker); };
  auto* sums = reinterpret_cast<float*>(scratch(executor.workers()));
  if (p.dq || p.dk || p.dv) {
    const KeyGradients gradients = key_gradients(p);
    const std::int64_t rows = chunk_rows(p, p.lists);
    gradients.run(executor, sums,
                  [&](std::int64_t b, std::int64_t kv_head, std::int64_t cut, float* dk, float* dv, int worker) {
                    std::fill_n(dk, gradients.floats(), 0.0f);
                    SparseTask task{.b = b, .kv_head = kv_head};
                    const std::int64_t stored = p.sequence(b).q_rows;
                    for (std::int64_t chunk = cut; chunk * rows < stored; chunk += gradients.cuts()) {
                      task.row_begin = chunk * rows;
                      task.row_end = std::min(task.row_begin + rows, stored);
                      k.sparse_backward(p, task, dk, dv, scratch(worker));
                    }
                  });
  }
  if (p.dsink) {
    parallel_for(executor, p.H, [&](std::int64_t h, int) { sink_gradient(p, h); });
  }
}

}  // namespace

const SparseForwardKernel kSparseAttentionForward = {
    .name = "cpu",
    .method = "flash",
    .device = Device::cpu,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe,
};

const SparseBackwardKernel kSparseAttentionBackward = {
    .name = "cpu",
    .method = "flash",
    .device = Device::cpu,
    .automatic = true,
    .supports = supports_backward,
    .estimate = estimate_backward,
    .workspace = workspace_backward,
    .launch = launch_backward,
    .describe = describe_backward,
};

}  // namespace heddle::cpu
