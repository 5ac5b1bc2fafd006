// Launches the backward on the CPU. Work is cut by the problem alone, so every bit is the same with any number of
// threads.
#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/dtypes.h"
#include "core/parallel.h"
#include "cpu/attention.h"
#include "cpu/kernels.h"
#include "cpu/key_gradients.h"
#include "cpu/unused_rows.h"
#include "problem/attended_pairs.h"

namespace heddle::cpu {
namespace {

using Problem = AttentionBackwardProblem;

std::size_t scratch_bytes(const Problem& p) {
  const std::size_t tile = kernels().backward_scratch(p), bias = p.dbias ? kernels().bias_scratch(p) : 0;
  return static_cast<std::size_t>(round_up(static_cast<std::int64_t>(std::max(tile, bias)), 64));
}

Refusal supports(const Problem&) { return ""; }

double estimate(const Problem& p, int workers) { return seconds_of_tiles(p, workers, 20); }

std::size_t workspace(const Problem& p, int workers) {
  return scratch_bytes(p) * static_cast<std::size_t>(workers) + gradients_of_tiles(p).bytes(workers);
}

std::string describe(const Problem& p, int workers) { return describe_tiles(p, workers); }

void launch(const Problem& p, const Runtime& runtime) {
  const Kernels& k = kernels();
  Executor& executor = *runtime.executor;
  auto* memory = static_cast<std::byte*>(runtime.workspace.data);
  const std::size_t scratch_each = scratch_bytes(p);
  const auto scratch = [&](int worker) { return memory + scratch_each * static_cast<std::size_t>(worker); };
  auto* sums = reinterpret_cast<float*>(scratch(executor.workers()));

  if (p.seqused_q && p.dq && !p.accumulate) {
    parallel_for(executor, p.B, [&](std::int64_t b, int) { zero_unused_rows(p, b, p.dq, p.D); });
  }
  if (p.dq || p.dk || p.dv) {
    const KeyGradients gradients = gradients_of_tiles(p);
    gradients.run(executor, sums,
                  [&](std::int64_t b, std::int64_t kv_head, std::int64_t cut, float* dk, float* dv, int worker) {
                    k.backward(p,
                               {.b = b,
                                .kv_head = kv_head,
                                .first_tile = cut,
                                .tile_step = gradients.cuts(),
                                .dk = dk,
                                .dv = dv,
                                .tiles = {}},
                               scratch(worker));
                  });
  }
  if (p.dbias) {
    const std::int64_t rows = p.bias_rows == 1 ? p.Sq : kBiasRows,
                       tiles = p.bias_rows == 1 ? 1 : ceil_div(p.Sq, kBiasRows);
    parallel_for(executor, p.bias_batch * p.bias_heads * tiles, [&](std::int64_t index, int worker) {
      BiasTask task;
      task.bias_b = index / tiles / p.bias_heads;
      task.bias_h = index / tiles % p.bias_heads;
      task.row_begin = index % tiles * rows;
      task.row_end = std::min(task.row_begin + rows, p.Sq);
      k.bias_gradient(p, task, scratch(worker));
    });
  }
  if (p.dsink) {
    parallel_for(executor, p.H, [&](std::int64_t h, int) { sink_gradient(p, h); });
  }
}

}  // namespace

// dL/dsink_h = -sum over rows of p_sink * delta, with p_sink = exp(sink - lse).
void sink_gradient(const AttentionBackwardProblem& p, std::int64_t h) {
  double sum = 0;
  const double sink = p.sink.as<const float>()[h * p.sink.stride_h];
  for (std::int64_t b = 0; b < p.B; ++b) {
    const Sequence s = p.sequence(b);
    for (std::int64_t i = 0; i < s.sq; ++i) {
      const std::int64_t row = s.q_begin + i;
      const double lse = p.lse.as<const float>()[p.lse.offset(b, h, row)];
      if (std::isinf(lse) && lse < 0) continue;
      const std::byte *o = p.o.at(b, row, h), *d_o = p.d_o.at(b, row, h);
      double delta = p.d_lse ? -static_cast<double>(p.d_lse.as<const float>()[p.d_lse.offset(b, h, row)]) : 0.0;
      for (std::int64_t d = 0; d < p.Dv; ++d) {
        const double out = load_element(o, p.o.dtype, d * p.o.stride_d);
        // A row without keys has o = 0, and its d_o may hold anything.
        if (out != 0) delta += out * static_cast<double>(load_element(d_o, p.d_o.dtype, d * p.d_o.stride_d));
      }
      sum -= std::exp(sink - lse) * delta;
    }
  }
  p.dsink.as<float>()[h * p.dsink.stride_h] = static_cast<float>(sum);
}

const AttentionBackwardKernel kAttentionBackward = {
    .name = "cpu",
    .method = "flash",
    .device = Device::cpu,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe,
    .extras = kPiece | kFloat32Out | kFloat32Gradients | kSteps,
};

}  // namespace heddle::cpu
