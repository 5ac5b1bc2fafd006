// Launches the choice of blocks on the CPU. How rows are cut into chunks moves work between workers without changing a
// list.
#include <algorithm>

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/kernels.h"
#include "cpu/nsa.h"
#include "cpu/plan.h"

namespace heddle::cpu {
namespace {

// Positions of a chunk, which share each packed tile of pooled keys: whole register tiles whose q stays in a core's
// cache, and fewer where there would be less than two chunks for a worker.
std::int64_t chunk_rows(const SelectProblem& p, int workers) {
  constexpr std::int64_t kCachedFloats = 1 << 16;
  const std::int64_t group = kernels().group, heads = std::max<std::int64_t>(1, p.B * p.Hkv);
  const std::int64_t cached = kCachedFloats / (p.G * p.D) / group * group;
  const std::int64_t even = round_up(ceil_div(p.Sq * heads, 2 * workers), group);
  return std::max(group, std::min(cached, even));
}

std::size_t scratch_bytes(const SelectProblem& p, int workers) {
  return static_cast<std::size_t>(
      round_up(static_cast<std::int64_t>(kernels().select_scratch(p, chunk_rows(p, workers))), 64));
}

double estimate(const SelectProblem& p, int workers) {
  // Of the pooled keys that rows see, about a half, and all where there are more than rows.
  const double pairs = static_cast<double>(p.B * p.H * p.Sq) * static_cast<double>(p.Sk) / 2;
  const double flops = (2.0 * static_cast<double>(p.D) + 16.0) * (p.lse ? 1 : 2);
  return 3e-6 + pairs * flops / ((p.dtype == DType::bf16 ? kernels().bf16_rate : kernels().f32_rate) * workers);
}

std::string describe(const SelectProblem& p, int workers) {
  return text(kernels().name, ", chunks of ", chunk_rows(p, workers), " rows over tiles of ", kKeyBlock,
              " pooled keys, ", p.lse ? "one product" : "two products", ", ", workers,
              workers == 1 ? " thread" : " threads");
}

void launch(const SelectProblem& p, const Runtime& runtime) {
  const Kernels& k = kernels();
  Executor& executor = *runtime.executor;
  const std::int64_t rows = chunk_rows(p, executor.workers()), chunks = ceil_div(p.Sq, rows);
  const std::size_t each = scratch_bytes(p, executor.workers());
  auto* memory = static_cast<std::byte*>(runtime.workspace.data);
  parallel_for(executor, p.B * p.Hkv * chunks, [&](std::int64_t index, int worker) {
    // The last rows first: they see most.
    SparseTask task{.b = index / (p.Hkv * chunks), .kv_head = index / chunks % p.Hkv};
    task.row_begin = (chunks - 1 - index % chunks) * rows;
    task.row_end = std::min(task.row_begin + rows, p.sequence(task.b).q_rows);
    if (task.row_begin < task.row_end) k.select_blocks(p, task, memory + each * static_cast<std::size_t>(worker));
  });
}

}  // namespace

const SelectKernel kSelectBlocks = {
    .name = "cpu",
    .method = "select",
    .device = Device::cpu,
    .automatic = true,
    .supports = serves_all,
    .estimate = estimate,
    .workspace = [](const SelectProblem& p,
                    int workers) { return scratch_bytes(p, workers) * static_cast<std::size_t>(workers); },
    .launch = launch,
    .describe = describe,
};

}  // namespace heddle::cpu
