// Launches attention with a tolerance on the CPU: first what must be known of each block of values, then tiles of rows.
#include "cpu/adaptive.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/adaptive_plan.h"
#include "cpu/attention.h"
#include "cpu/kernels.h"
#include "cpu/key_gradients.h"
#include "cpu/unused_rows.h"
#include "problem/attended_pairs.h"

namespace heddle::cpu {
namespace {

constexpr std::int64_t kBlocksOfTask = 32;  // blocks of values that one task measures

std::int64_t blocks_of(const AttentionProblem& p) { return ceil_div(p.Sk, kAdaptiveKeys); }

// Query rows of a task: fewer than a tile where there would be too few tasks; moves work only, not bits.
std::int64_t task_rows(const AttentionProblem& p, int workers) {
  const int group = kernels().group;
  std::int64_t rows = tile_rows(p);
  while (rows > group && p.B * p.Hkv * ceil_div(p.Sq * p.G, rows) < 3 * workers) {
    rows = std::max<std::int64_t>(rows / 2 / group * group, group);
  }
  return rows;
}

// Per kv head of each sequence, one after the other in the workspace.
struct Values {
  explicit Values(const AttentionProblem& p, std::byte* at = nullptr) : each(blocks_of(p)), width(mean_width(p)) {
    blocks = reinterpret_cast<ValueBlock*>(at);
    block_bytes = round_up(p.B * p.Hkv * each * static_cast<std::int64_t>(sizeof(ValueBlock)), 64);
    means = at == nullptr ? nullptr : reinterpret_cast<float*>(at + block_bytes);
    bytes = static_cast<std::size_t>(block_bytes + round_up(p.B * p.Hkv * each * width * 4, 64));
  }
  ValueBlock* blocks_at(std::int64_t head) const { return blocks + head * each; }
  float* means_at(std::int64_t head) const { return means + head * each * width; }

  std::int64_t each, width, block_bytes;
  ValueBlock* blocks;
  float* means;
  std::size_t bytes;
};

std::size_t scratch_bytes(const AdaptiveProblem& p, int workers) {
  const std::int64_t rows = std::min(task_rows(p, workers), p.Sq * p.G);
  const std::size_t most = std::max(kernels().adaptive_scratch(p, rows), kernels().value_scratch(p));
  return static_cast<std::size_t>(round_up(static_cast<std::int64_t>(most), 64));
}

// From units of each block's own to those of the longest value of the head, rounded outward.
void in_units_of_longest(ValueBlock* blocks, std::int64_t count) {
  double longest = 0;
  for (std::int64_t n = 0; n < count; ++n) {
    longest = std::max(longest, std::ldexp(static_cast<double>(blocks[n].longest), blocks[n].exponent));
  }
  for (std::int64_t n = 0; n < count; ++n) {
    ValueBlock& block = blocks[n];
    if (std::isinf(block.radius) || block.longest == 0) continue;
    const double unit = std::ldexp(1.0, block.exponent) / longest;
    block.radius = static_cast<float>(block.radius * unit * (1 + 0x1p-23));
    block.width = static_cast<float>(block.width * unit * (1 + 0x1p-23));
  }
}

Refusal supports(const AdaptiveProblem&) { return ""; }

double estimate(const AdaptiveProblem& p, int workers) {
  const double rate = p.dtype == DType::bf16 ? kernels().bf16_rate : kernels().f32_rate;
  const double pairs = static_cast<double>(p.B * p.H) * attended_pairs(p);
  // As if nothing were replaced: what is, follows from the data.
  return 6e-6 + pairs * (2.0 * static_cast<double>(p.D + p.Dv) + 16.0) / (rate * workers);
}

std::size_t workspace(const AdaptiveProblem& p, int workers) {
  return Values(p).bytes + scratch_bytes(p, workers) * static_cast<std::size_t>(workers);
}

std::string describe(const AdaptiveProblem& p, int workers) {
  return text(kernels().name, ", tiles of ", task_rows(p, workers), " rows x ", kKeyBlock, " keys, decided by ",
              kernels().group, " rows x ", kAdaptiveKeys, " keys, ", workers, workers == 1 ? " thread" : " threads");
}

// What rows that are not used have.
void empty_unused_rows(const AdaptiveProblem& p, std::int64_t b) {
  zero_unused_rows(p, b, p.o, p.Dv);
  const Sequence s = p.sequence(b);
  for (std::int64_t i = s.sq; i < s.q_rows; ++i) {
    for (std::int64_t h = 0; h < p.H; ++h) {
      if (p.lse) {
        p.lse.as<float>()[p.lse.offset(b, h, s.q_begin + i)] = -std::numeric_limits<float>::infinity();
      }
      if (p.bound) p.bound.as<float>()[p.bound.offset(b, h, s.q_begin + i)] = 0;
    }
  }
}

void launch(const AdaptiveProblem& p, const Runtime& runtime) {
  const Kernels& k = kernels();
  Executor& executor = *runtime.executor;
  auto* memory = static_cast<std::byte*>(runtime.workspace.data);
  const Values values(p, memory);
  const std::size_t each = scratch_bytes(p, executor.workers());
  const auto scratch = [&](int worker) { return memory + values.bytes + each * static_cast<std::size_t>(worker); };

  if (p.replaced) {
    const std::int64_t batches = p.cu_seqlens_q ? 1 : p.B;
    std::memset(p.replaced.data, 0, static_cast<std::size_t>(batches * p.Hkv * p.replaced.runs * p.replaced.bytes));
  }
  if (p.seqused_q) parallel_for(executor, p.B, [&](std::int64_t b, int) { empty_unused_rows(p, b); });
  const std::int64_t parts = ceil_div(blocks_of(p), kBlocksOfTask);
  parallel_for(executor, p.B * p.Hkv * parts, [&](std::int64_t index, int worker) {
    const std::int64_t head = index / parts, begin = index % parts * kBlocksOfTask;
    const std::int64_t blocks = ceil_div(p.sequence(head / p.Hkv).sk, kAdaptiveKeys);
    const std::int64_t end = std::min(begin + kBlocksOfTask, blocks);
    if (begin < end) {
      k.value_blocks(p, head / p.Hkv, head % p.Hkv, begin, end, values.blocks_at(head), values.means_at(head),
                     scratch(worker));
    }
  });
  parallel_for(executor, p.B * p.Hkv, [&](std::int64_t head, int) {
    in_units_of_longest(values.blocks_at(head), ceil_div(p.sequence(head / p.Hkv).sk, kAdaptiveKeys));
  });
  const std::int64_t rows = task_rows(p, executor.workers()), tiles = ceil_div(p.Sq * p.G, rows);
  parallel_for(executor, p.B * p.Hkv * tiles, [&](std::int64_t index, int worker) {
    const std::int64_t head = index / tiles;
    AdaptiveTask task{.b = head / p.Hkv, .kv_head = head % p.Hkv};
    const Sequence s = p.sequence(task.b);
    task.row_begin = (tiles - 1 - index % tiles) * rows;  // the last rows first: under a causal mask they cost most
    task.row_end = std::min(task.row_begin + rows, s.sq * p.G);
    if (task.row_begin >= task.row_end) return;
    task.values = values.blocks_at(head);
    task.means = values.means_at(head);
    task.outward = adaptive_outward(ceil_div(s.sk, kKeyBlock));
    // Once for what comes after the decision, and once for the bound that is written.
    task.limit = static_cast<float>(p.tol / (task.outward * task.outward) * (1 - 0x1p-22));
    k.adaptive_forward(p, task, scratch(worker));
  });
}

using Backward = AdaptiveBackwardProblem;

std::size_t backward_scratch(const Backward& p) {
  return static_cast<std::size_t>(round_up(static_cast<std::int64_t>(kernels().adaptive_backward_scratch(p)), 64));
}

Refusal supports_backward(const Backward& p) {
  return p.alibi || p.softcap > 0 ? "it has no gradients with ALiBi or softcap" : "";
}

double estimate_backward(const Backward& p, int workers) { return seconds_of_tiles(p, workers, 24); }

std::size_t workspace_backward(const Backward& p, int workers) {
  return backward_scratch(p) * static_cast<std::size_t>(workers) + gradients_of_tiles(p).bytes(workers);
}

std::string describe_backward(const Backward& p, int workers) { return describe_tiles(p, workers); }

void launch_backward(const Backward& p, const Runtime& runtime) {
  const Kernels& k = kernels();
  Executor& executor = *runtime.executor;
  auto* memory = static_cast<std::byte*>(runtime.workspace.data);
  const std::size_t each = backward_scratch(p);
  const auto scratch = [&](int worker) { return memory + each * static_cast<std::size_t>(worker); };
  if (p.seqused_q && p.dq && !p.accumulate) {
    parallel_for(executor, p.B, [&](std::int64_t b, int) { zero_unused_rows(p, b, p.dq, p.D); });
  }
  if (p.dq || p.dk || p.dv) {
    const KeyGradients gradients = gradients_of_tiles(p);
    gradients.run(executor, reinterpret_cast<float*>(scratch(executor.workers())),
                  [&](std::int64_t b, std::int64_t kv_head, std::int64_t cut, float* dk, float* dv, int worker) {
                    const BackwardTask task{.b = b,
                                            .kv_head = kv_head,
                                            .first_tile = cut,
                                            .tile_step = gradients.cuts(),
                                            .dk = dk,
                                            .dv = dv,
                                            .tiles = {}};
                    k.adaptive_backward(p, task, scratch(worker));
                  });
  }
  if (p.dsink) {
    parallel_for(executor, p.H, [&](std::int64_t h, int) { sink_gradient(p, h); });
  }
}

}  // namespace

const AdaptiveForwardKernel kAdaptiveAttentionForward = {
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

const AdaptiveBackwardKernel kAdaptiveAttentionBackward = {
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
