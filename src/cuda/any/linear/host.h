// What the candidates for linear layers have in common on the host.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string>

#include "cuda/any/linear/params.h"
#include "cuda/any/linear/plan.h"
#include "cuda/any/linear/rows.h"
#include "cuda/assumed_gpu.h"
#include "cuda/cost.h"
#include "problem/linear.h"

namespace heddle::cuda::linear {

// Elements between rows, if those lie one such stride apart.
std::optional<std::int64_t> row_stride(const RowsOf& rows);

// What no candidate takes, whatever the GPU; empty if there is nothing.
std::string refuse(const LinearProblem& problem);

NormInFront norm_in_front(const LinearProblem& problem);

// The pass over x to `to`, with a norm if the problem has one; scales: null, or of 8 bits.
RowsPass rows_pass(const LinearProblem& problem, std::int64_t pitch, std::byte* to, float* scales);

// Everything but token_scales.
Output output_of(const LinearProblem& problem);

// Where a launch leaves partial sums. mark: not used before by this process.
Schedule schedule_of(const LinearProblem& problem, const Plan& plan, std::byte* workspace);
std::size_t workspace_of(const Plan& plan);
constexpr std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// In words: "tiles of 64 rows of x and 128 of W on 132 CTAs, 4 tiles shared through the workspace".
std::string words_of(const TileShape& tile, const Plan& plan);

// Seconds of the pass over x: what it reads and writes; with its launch, where a candidate's fixed cost is without it.
double rows_traffic_seconds(const LinearProblem& problem);
double rows_seconds(const LinearProblem& problem);

// Seconds of an activation, which nothing hides: gelu_tanh was measured on an H200, the others call functions as long.
double activation_seconds(const LinearProblem& problem);

// What units last here: so many times as long as on an H200, those of tiles for few rows and of others.
struct Speed {
  double fixed = 0;  // seconds of a launch
  double few = 1, many = 1;
};
// Of a candidate's lines: of many rows, and of few.
inline Speed speed_of(std::span<const CostLine<LinearProblem>> costs) {
  return {.fixed = cost_of(costs[0]).fixed, .few = times_as_long(costs[1]), .many = times_as_long(costs[0])};
}

// An instantiation, and what was measured of it on an H200.
template <class Variant>
struct Measured {
  const Variant* variant;
  double unit;             // seconds of a unit of a CTA, all of them busy
  bool invariant = false;  // the one to take where the order of sums must not depend on M
};

template <class Variant>
struct Choice {
  const Variant* variant = nullptr;
  Plan plan;
  double seconds = 0;
};

// The quickest, in clusters or not. Where the order of sums must not depend on M, no tile is shared.
template <class Variant, std::size_t kCount>
Choice<Variant> choose(const LinearProblem& p, const std::array<Measured<Variant>, kCount>& variants,
                       int multiprocessors, const Speed& speed) {
  constexpr int kFewRows = 64;
  Choice<Variant> best;
  const auto consider = [&](const Measured<Variant>& v, const Plan& plan) {
    const TileShape& tile = v.variant->tile;
    const double units = static_cast<double>(plan.units), grid = plan.grid;
    const double shared =
        plan.cluster > 1 ? (plan.units + plan.cluster - 1) / plan.cluster : plan.shared_tiles * units / grid;
    const double whole = (plan.tiles - plan.shared_tiles + plan.grid - 1) / plan.grid * units;
    const double kib = tile.row_blocks / tile.row_groups * tile.accumulators * 0.5;  // 128 threads, 4 bytes each
    // What adding up costs: in a cluster by its size, whose CTAs' sums are read one after the other; else through the
    // workspace.
    const double merge = plan.cluster > 1        ? 1.0e-6 + kib * 0.03e-6 + (plan.cluster - 2) * 1.6e-6
                         : plan.shared_tiles > 0 ? 3.0e-6 + kib * 0.1e-6
                                                 : 0.0;
    const double unit = v.unit * (tile.tokens <= kFewRows ? speed.few : speed.many);
    const double seconds = speed.fixed + (shared + whole) * unit + merge;
    if (best.variant == nullptr || seconds < best.seconds) best = {v.variant, plan, seconds};
  };
  for (const Measured<Variant>& v : variants) {
    if (p.batch_invariant && !v.invariant) continue;
    const TileShape& tile = v.variant->tile;
    Plan plan =
        plan_of(tile, p.M, p.fragments().layout.row_blocks, p.fragments().layout.column_blocks, multiprocessors);
    if (p.batch_invariant) plan = unshared(plan, multiprocessors);
    consider(v, plan);
    if constexpr (requires { v.variant->clusters_at_once; }) {
      if (p.batch_invariant) continue;
      const auto fits = [&](int size) { return clusters_held(v.variant->clusters_at_once, size); };
      const Plan in_clusters = clustered(plan, tile, multiprocessors, fits);
      if (in_clusters.cluster > 1) consider(v, in_clusters);
    }
  }
  return best;
}

}  // namespace heddle::cuda::linear
