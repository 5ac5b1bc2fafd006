// Launches attention over lists on the CPU. Each task gathers the rows of a chunk block by block; how rows are cut into
// chunks moves work between workers without changing a bit.
#include "cpu/sparse.h"

#include <algorithm>

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/kernels.h"
#include "problem/attended_pairs.h"

namespace heddle::cpu {
namespace {

// Positions of a chunk: as many as fill the lanes some times over for each block that they list, so that packing the
// block does not count, and few enough that their running sums stay in a core's cache.
std::int64_t chunk_rows(const SparseProblem& p, int workers) {
  constexpr std::int64_t kLeast = 64, kMost = 4096, kCachedFloats = 1 << 18, kRowsOfBlock = 96;
  const std::int64_t blocks = std::max<std::int64_t>(1, ceil_div(p.Sk, p.lists.block_size));
  const std::int64_t listed = p.G * std::clamp<std::int64_t>(p.lists.entries, 1, blocks);
  const std::int64_t cached = kCachedFloats / (p.G * (p.D + p.Dv)), filling = ceil_div(kRowsOfBlock * blocks, listed);
  std::int64_t rows = std::clamp(std::max(cached, filling), kLeast, kMost);
  // Something to do for every worker.
  const std::int64_t heads = std::max<std::int64_t>(1, p.B * p.Hkv);
  rows = std::min(rows, std::max(kLeast, ceil_div(p.Sq * heads, 2 * workers)));
  return std::min(rows, std::max<std::int64_t>(p.Sq, 1));
}

std::size_t scratch_bytes(const SparseProblem& p, int workers) {
  return static_cast<std::size_t>(
      round_up(static_cast<std::int64_t>(kernels().sparse_scratch(p, chunk_rows(p, workers))), 64));
}

Refusal supports(const SparseProblem& p) {
  if (p.dtype == DType::f8e4m3) return "it takes queries in float32, float16 and bfloat16, not float8_e4m3fn";
  if (p.bias || p.mask) return "it takes no bias and no mask beside lists";
  if (p.dropout.p > 0) return "it has no dropout";
  return "";
}

double estimate(const SparseProblem& p, int workers) {
  const Kernels& k = kernels();
  const double rate = p.dtype == DType::bf16 ? k.bf16_rate : k.f32_rate;
  const double rows = static_cast<double>(p.B * p.H) * static_cast<double>(p.Sq);
  const double pairs = std::min(static_cast<double>(p.B * p.H) * attended_pairs(p),
                                rows * static_cast<double>(p.lists.entries * p.lists.block_size));
  return 3e-6 + pairs * (2.0 * static_cast<double>(p.D + p.Dv) + 16.0) / (rate * workers);
}

std::size_t workspace(const SparseProblem& p, int workers) {
  return scratch_bytes(p, workers) * static_cast<std::size_t>(workers);
}

std::string describe(const SparseProblem& p, int workers) {
  return text(kernels().name, ", chunks of ", chunk_rows(p, workers), " rows gathered by blocks of ",
              p.lists.block_size, " keys, ", workers, workers == 1 ? " thread" : " threads");
}

void launch(const SparseProblem& p, const Runtime& runtime) {
  const Kernels& k = kernels();
  Executor& executor = *runtime.executor;
  const std::int64_t rows = chunk_rows(p, executor.workers()), chunks = ceil_div(p.Sq, rows);
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

}  // namespace heddle::cpu
