// Which tiles a launch has, and how they are dealt out, on the host.
#pragma once

#include <cstddef>
#include <cstdint>

namespace heddle::cuda::linear {

// What one instantiation computes at a time.
struct TileShape {
  int tokens, row_blocks;    // of a tile; blocks of 64 rows
  int unit_blocks;           // blocks of 128 columns in a unit
  int row_groups;            // warpgroups that finish sums
  int accumulators, slices;  // of a thread and block of rows; slices of 16 tokens
  int max_cluster = 1;       // CTAs that can share a tile through each other's shared memory
};

struct Plan {
  int row_tiles = 0, tiles = 0, units = 0, shared_tiles = 0, grid = 0;
  int cluster = 1;  // more: so many CTAs, which are neighbours, share each tile
  std::size_t partial_bytes = 0, mark_bytes = 0;
};

// Where tiles are shared, every CTA has a unit at least: those that share one wait for all from the first to the last.
constexpr Plan plan_of(const TileShape& tile, std::int64_t m, std::int64_t row_blocks, std::int64_t k_blocks,
                       int multiprocessors) {
  const auto pieces = [](std::int64_t n, std::int64_t size) { return static_cast<int>((n + size - 1) / size); };
  Plan plan;
  plan.row_tiles = pieces(row_blocks, tile.row_blocks);
  plan.tiles = plan.row_tiles * pieces(m, tile.tokens);
  plan.units = pieces(k_blocks, tile.unit_blocks);
  plan.grid = multiprocessors;
  if (plan.tiles < multiprocessors) {
    // As many CTAs for each tile, if that leaves few idle: with one for each nothing is shared.
    const int each = multiprocessors / plan.tiles < plan.units ? multiprocessors / plan.tiles : plan.units;
    const bool few_idle = each * plan.tiles * 10 >= multiprocessors * 9;
    if (few_idle || plan.units * plan.tiles < multiprocessors) plan.grid = each * plan.tiles;
    plan.shared_tiles = plan.grid == plan.tiles ? 0 : plan.tiles;
  } else {
    const int left = plan.tiles % multiprocessors;  // too few for a round of their own
    const bool few_idle = left * 10 >= multiprocessors * 9, too_few = left * plan.units < multiprocessors;
    plan.shared_tiles = few_idle || too_few ? 0 : left;
  }
  if (plan.shared_tiles > 0) {
    plan.partial_bytes = std::size_t{2} * plan.grid * tile.row_blocks * tile.accumulators * 128 * sizeof(float);
    plan.mark_bytes = std::size_t{2} * plan.grid * tile.row_groups * tile.slices * sizeof(std::uint64_t);
  }
  return plan;
}

// The same tiles, all shared, each by the CTAs of one cluster: as many as there are multiprocessors for, or none.
// fits(size): clusters of that size that the GPU holds at once.
template <class Fits>
constexpr Plan clustered(Plan plan, const TileShape& tile, int multiprocessors, Fits fits) {
  int each = tile.max_cluster;
  if (each * plan.tiles > multiprocessors) each = multiprocessors / plan.tiles;
  if (each > plan.units) each = plan.units;
  while (each > 1 && fits(each) < plan.tiles) --each;
  if (each <= 1) return plan;
  plan.cluster = each;
  plan.grid = each * plan.tiles;
  plan.shared_tiles = plan.tiles;
  plan.partial_bytes = plan.mark_bytes = 0;
  return plan;
}

// The same tiles, each of one CTA.
constexpr Plan unshared(Plan plan, int multiprocessors) {
  plan.shared_tiles = 0;
  plan.partial_bytes = plan.mark_bytes = 0;
  plan.grid = plan.tiles < multiprocessors ? plan.tiles : multiprocessors;
  return plan;
}

}  // namespace heddle::cuda::linear
