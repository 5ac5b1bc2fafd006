// Linear layers over packed weights: rows of x staged once, then tasks of rows of W.
#include "cpu/linear.h"

#include <algorithm>

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/kernels.h"
#include "cpu/linear_staging.h"

namespace heddle::cpu {
namespace {

constexpr std::int64_t round_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }

std::size_t scratch_each() {
  return static_cast<std::size_t>(round_up(static_cast<std::int64_t>(kernels().linear.scratch()), 64));
}

std::string supports(const LinearProblem&) { return ""; }

double estimate(const LinearProblem& p, int workers) {
  const Kernels& k = kernels();
  const double weights = static_cast<double>(p.N) * static_cast<double>(p.K);
  const double rate = in_pairs(p) ? k.bf16_rate : k.f32_rate;
  const double chunks = static_cast<double>((p.M + kLinearChunk - 1) / kLinearChunk);
  constexpr double kDecodeFlops = 8;  // what decoding a weight costs, in products
  return weights * (2 * static_cast<double>(p.M) + kDecodeFlops * chunks) / (rate * workers);
}

std::size_t workspace(const LinearProblem& p, int workers) {
  if (p.M == 0 || p.N == 0) return 0;
  return StagedRows(p, nullptr).bytes + scratch_each() * static_cast<std::size_t>(workers);
}

std::string describe(const LinearProblem& p, int workers) {
  return text(kernels().name, ", ", kLinearChunk, " rows of x and ", kLinearTile, " of W at a time, products ",
              p.int8_x      ? "in integers"
              : in_pairs(p) ? "of bf16 pairs"
                            : "in f32",
              ", ", workers, workers == 1 ? " thread" : " threads");
}

void launch(const LinearProblem& p, const Runtime& runtime) {
  if (p.M == 0 || p.N == 0) return;
  const LinearFunctions& kernel = kernels().linear;
  const std::size_t scratch = scratch_each();
  const StagedRows staged(p, static_cast<std::byte*>(runtime.workspace.data));
  std::byte* scratches = staged.rows + staged.bytes;
  const std::int64_t tiles = (p.N + kLinearTile - 1) / kLinearTile;
  staged.prepare(p);
  for (std::int64_t begin = 0; begin < p.M; begin += kLinearChunk) {
    const LinearTask task = staged.task(p, begin, std::min(kLinearChunk, p.M - begin));
    staged.stage(p, begin, task.m_count, *runtime.executor);
    parallel_for(*runtime.executor, tiles, [&](std::int64_t tile, int worker) {
      LinearTask mine = task;
      mine.tile = tile;
      kernel.forward(p, mine, scratches + scratch * static_cast<std::size_t>(worker));
    });
  }
}

}  // namespace

const LinearKernel kLinear = {
    .name = "cpu",
    .method = "linear",
    .device = Device::cpu,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe,
    .extras = kNormInFront,
};

}  // namespace heddle::cpu
