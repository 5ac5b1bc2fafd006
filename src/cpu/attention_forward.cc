// Launches the flash forward on the CPU: which rows and keys make one task, and who merges.
#include <algorithm>
#include <cstring>
#include <limits>

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/attention.h"
#include "cpu/kernels.h"
#include "cpu/unused_rows.h"
#include "problem/attended_pairs.h"

namespace heddle::cpu {
namespace {

// Tasks before sequence b, for every b; in the workspace.
struct Layout {
  std::int64_t tile_rows = 0;  // rows of a tile; moves work only, not bits
  bool split = false;          // whether chunks of split sequences are tasks of their own
};

std::int64_t tiles(const AttentionProblem& p, const Sequence& s, std::int64_t tile_rows) {
  return ceil_div(s.sq * p.G, tile_rows);
}

std::int64_t chunks(const AttentionProblem& p, const Sequence& s) {
  return splits_keys(p, s) ? ceil_div(s.sk, kKeyChunk) : 1;
}

bool any_split(const AttentionProblem& p) {
  if (p.Sk <= kKeyChunk) return false;
  for (std::int64_t b = 0; b < p.B; ++b) {
    if (splits_keys(p, p.sequence(b))) return true;
  }
  return false;
}

Layout layout(const AttentionProblem& p, int workers) {
  Layout l{.tile_rows = tile_rows(p)};
  const int group = kernels().group;
  std::int64_t all = 0;
  for (;;) {
    all = 0;
    for (std::int64_t b = 0; b < p.B; ++b) {
      const Sequence s = p.sequence(b);
      all += ceil_div(p.Hkv, kernels().heads_together(p, s)) * tiles(p, s, l.tile_rows);
    }
    // Smaller tiles pack each key block more often; worth it only to give every worker something to do.
    if (all >= 3 * workers || l.tile_rows <= group) break;
    l.tile_rows = std::max<std::int64_t>(l.tile_rows / 2 / group * group, group);
  }
  // Sequences that split their keys have one tile, whatever tile_rows says.
  l.split = workers > 1 && all < 4 * workers && any_split(p);
  return l;
}

std::size_t scratch_bytes(const AttentionProblem& p, const Layout& l) {
  const std::int64_t rows = std::min(std::max(l.tile_rows, kSplitRows), p.Sq * p.G);
  return static_cast<std::size_t>(round_up(static_cast<std::int64_t>(kernels().forward_scratch(p, rows)), 64));
}

std::size_t prefix_bytes(const AttentionProblem& p) { return static_cast<std::size_t>(round_up((p.B + 1) * 8, 64)); }

// One partial result, with room for the most rows that split their keys.
std::size_t partial_bytes(const AttentionProblem& p) { return kernels().partial_floats(p) * 4; }

Refusal supports(const AttentionProblem& p) {
  return p.dtype == DType::f8e4m3 ? "it takes queries in float32, float16 and bfloat16, not float8_e4m3fn" : "";
}

double estimate(const AttentionProblem& p, int workers) {
  const Kernels& k = kernels();
  const bool narrow = p.int4 || p.k.dtype == DType::f8e4m3;  // multiplied in f32
  const double rate = p.dtype == DType::bf16 && !narrow ? k.bf16_rate : k.f32_rate;
  const double pairs = static_cast<double>(p.B * p.H) * attended_pairs(p);
  const double work = pairs * (2.0 * static_cast<double>(p.D + p.Dv) + 12.0);
  return 3e-6 + work / (rate * workers);
}

std::size_t workspace(const AttentionProblem& p, int workers) {
  const Layout l = layout(p, workers);
  const std::int64_t partials = l.split ? p.B * p.Hkv * ceil_div(p.Sk, kKeyChunk) : 0;
  return prefix_bytes(p) + scratch_bytes(p, l) * static_cast<std::size_t>(workers) +
         static_cast<std::size_t>(partials) * partial_bytes(p);
}

std::string describe(const AttentionProblem& p, int workers) {
  const Layout l = layout(p, workers);
  return text(kernels().name, ", tiles of ", l.split ? kSplitRows : l.tile_rows, " rows x ", kKeyBlock, " keys",
              l.split ? text(", keys split by ", kKeyChunk) : "", ", ", workers, workers == 1 ? " thread" : " threads");
}

void empty_unused_rows(const AttentionProblem& p, std::int64_t b) {
  zero_unused_rows(p, b, p.o, p.Dv);
  if (!p.lse) return;
  const Sequence s = p.sequence(b);
  for (std::int64_t i = s.sq; i < s.q_rows; ++i) {
    for (std::int64_t h = 0; h < p.H; ++h) {
      p.lse.as<float>()[p.lse.offset(b, h, s.q_begin + i)] = -std::numeric_limits<float>::infinity();
    }
  }
}

void launch(const AttentionProblem& p, const Runtime& runtime) {
  const Kernels& k = kernels();
  Executor& executor = *runtime.executor;
  const int workers = executor.workers();
  const Layout l = layout(p, workers);
  auto* memory = static_cast<std::byte*>(runtime.workspace.data);
  auto* before = reinterpret_cast<std::int64_t*>(memory);
  std::byte* scratch = memory + prefix_bytes(p);
  const std::size_t scratch_each = scratch_bytes(p, l);
  auto* partials = reinterpret_cast<float*>(scratch + scratch_each * static_cast<std::size_t>(workers));
  const auto partial_floats = static_cast<std::int64_t>(k.partial_floats(p));
  const std::int64_t slots = ceil_div(p.Sk, kKeyChunk);  // partial results kept for each kv head of each sequence

  struct Cut {
    std::int64_t tiles, chunks, tile_rows, heads;  // heads: taken together
  };
  const auto cut = [&](const Sequence& s) {
    const bool split = splits_keys(p, s);
    const std::int64_t rows = split ? kSplitRows : l.tile_rows;
    return Cut{tiles(p, s, rows), split && l.split ? chunks(p, s) : 1, rows, k.heads_together(p, s)};
  };
  before[0] = 0;
  for (std::int64_t b = 0; b < p.B; ++b) {
    const Cut c = cut(p.sequence(b));
    before[b + 1] = before[b] + ceil_div(p.Hkv, c.heads) * c.tiles * c.chunks;
  }

  const auto task_at = [&](std::int64_t index) {
    ForwardTask task;
    task.b = std::upper_bound(before, before + p.B + 1, index) - before - 1;
    const Sequence s = p.sequence(task.b);
    const Cut c = cut(s);
    std::int64_t rest = index - before[task.b];
    const std::int64_t chunk = rest % c.chunks;
    rest /= c.chunks;
    const std::int64_t tile = c.tiles - 1 - rest % c.tiles;  // the last rows first: under a causal mask they cost most
    task.kv_head = rest / c.tiles * c.heads;
    task.kv_heads = std::min(c.heads, p.Hkv - task.kv_head);
    task.row_begin = tile * c.tile_rows;
    task.row_end = std::min(task.row_begin + c.tile_rows, s.sq * p.G);
    task.key_begin = 0;
    task.key_end = s.sk;
    if (c.chunks > 1) {
      task.key_begin = chunk * kKeyChunk;
      task.key_end = std::min(task.key_begin + kKeyChunk, s.sk);
      task.partial = partials + ((task.b * p.Hkv + task.kv_head) * slots + chunk) * partial_floats;
      task.partial_head_stride = slots * partial_floats;
    }
    return task;
  };

  if (p.seqused_q) parallel_for(executor, p.B, [&](std::int64_t b, int) { empty_unused_rows(p, b); });
  parallel_for(executor, before[p.B], [&](std::int64_t index, int worker) {
    k.forward(p, task_at(index), scratch + scratch_each * static_cast<std::size_t>(worker));
  });
  if (!l.split) return;
  parallel_for(executor, p.B * p.Hkv, [&](std::int64_t index, int worker) {
    ForwardTask task;
    task.b = index / p.Hkv;
    task.kv_head = index % p.Hkv;
    const Sequence s = p.sequence(task.b);
    if (s.sq == 0 || cut(s).chunks == 1) return;
    task.row_end = s.sq * p.G;
    task.partial = partials + (task.b * p.Hkv + task.kv_head) * slots * partial_floats;
    k.merge(p, task, chunks(p, s), scratch + scratch_each * static_cast<std::size_t>(worker));
  });
}

}  // namespace

const AttentionForwardKernel kAttentionForward = {
    .name = "cpu",
    .method = "flash",
    .device = Device::cpu,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe,
    .extras = kE4m3 | kDraftMask | kInt4 | kPiece | kFloat32Out | kSteps,
};

}  // namespace heddle::cpu
