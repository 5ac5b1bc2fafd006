// How the tiles of linear layers are dealt out on a GPU: the arithmetic of the kernels
// (src/cuda/any/linear/schedule.cuh), for every CTA of many launches.
#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "cuda/any/linear/plan.h"

namespace heddle::cuda::linear {
namespace {

constexpr TileShape kTiles[] = {
    {.tokens = 8, .row_blocks = 1, .unit_blocks = 4, .row_groups = 1, .accumulators = 4, .slices = 1},
    {.tokens = 16, .row_blocks = 1, .unit_blocks = 4, .row_groups = 1, .accumulators = 8, .slices = 1},
    {.tokens = 64, .row_blocks = 4, .unit_blocks = 1, .row_groups = 2, .accumulators = 32, .slices = 4},
    {.tokens = 32, .row_blocks = 2, .unit_blocks = 2, .row_groups = 2, .accumulators = 16, .slices = 2},
    {.tokens = 64, .row_blocks = 4, .unit_blocks = 1, .row_groups = 4, .accumulators = 32, .slices = 4},
    {.tokens = 128, .row_blocks = 3, .unit_blocks = 1, .row_groups = 3, .accumulators = 64, .slices = 8},
    {.tokens = 256, .row_blocks = 2, .unit_blocks = 1, .row_groups = 2, .accumulators = 128, .slices = 16}};

class Deal {
 public:
  Deal(const Plan& plan) : plan_(plan) {}
  int first_unit(int cta) const { return plan_.shared_tiles * plan_.units * cta / plan_.grid; }
  int cta_of(int unit) const { return ((unit + 1) * plan_.grid - 1) / (plan_.shared_tiles * plan_.units); }

  // Units of each tile that have been computed, and, of shared tiles, by which CTAs.
  void run() {
    for (int cta = 0; cta < plan_.grid; ++cta) {
      const int first = first_unit(cta), end = first_unit(cta + 1);
      if (end > first) {
        ASSERT_LE((end - 1) / plan_.units - first / plan_.units, 1) << "more than two shared tiles";
      }
      for (int unit = first; unit < end; ++unit) {
        ++units[unit / plan_.units];
        owners[unit / plan_.units][cta] = true;
        ASSERT_EQ(cta_of(unit), cta);
      }
      for (int tile = plan_.shared_tiles + cta; tile < plan_.tiles; tile += plan_.grid) units[tile] += plan_.units;
    }
  }

  std::map<int, int> units;
  std::map<int, std::map<int, bool>> owners;

 private:
  const Plan plan_;
};

template <class Visit>
void for_each_launch(Visit visit) {
  for (const TileShape& tile : kTiles) {
    for (const int multiprocessors : {132, 114, 16}) {
      for (const std::int64_t m : {1, 8, 40, 64, 129, 700}) {
        for (const std::int64_t rows : {1, 3, 36, 66, 71, 128, 141, 448}) {
          for (const std::int64_t columns : {1, 2, 3, 4, 8, 33, 64}) {
            SCOPED_TRACE(testing::Message() << tile.tokens << " tokens, " << multiprocessors << " multiprocessors, M "
                                            << m << ", blocks " << rows << " x " << columns);
            visit(tile, plan_of(tile, m, rows, columns, multiprocessors), multiprocessors);
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(LinearPlan, EveryUnitOnceAndNobodyWaitsForNothing) {
  for_each_launch([](const TileShape&, const Plan& plan, int multiprocessors) {
    ASSERT_GE(plan.grid, 1);
    ASSERT_LE(plan.grid, multiprocessors);
    Deal deal(plan);
    deal.run();
    if (testing::Test::HasFatalFailure()) return;
    ASSERT_EQ(deal.units.size(), static_cast<std::size_t>(plan.tiles));
    for (const auto& [t, count] : deal.units) ASSERT_EQ(count, plan.units) << "tile " << t;
    // Who shares a tile waits for all CTAs from its first unit's to its last one's: each must have some of it.
    for (int t = 0; t < plan.shared_tiles; ++t) {
      const int first = deal.cta_of(t * plan.units), last = deal.cta_of((t + 1) * plan.units - 1);
      ASSERT_EQ(deal.owners[t].size(), static_cast<std::size_t>(last - first + 1)) << "tile " << t;
    }
    ASSERT_EQ(plan.shared_tiles > 0, plan.partial_bytes > 0);
  });
}

// A cluster's CTAs, which are neighbours, have one tile together and nothing else, and the GPU holds all clusters of
// the launch at once.
TEST(LinearPlan, ClustersShareOneTile) {
  int launches = 0;
  for (const int at_once : {1000, 40, 30, 7}) {  // clusters of 4
    const auto fits = [&](int size) { return at_once * 4 / size; };
    for_each_launch([&](TileShape tile, const Plan& plan, int multiprocessors) {
      tile.max_cluster = 8;
      const Plan found = clustered(plan, tile, multiprocessors, fits);
      if (found.cluster == 1) {
        ASSERT_FALSE(2 * plan.tiles <= multiprocessors && 2 <= plan.units && fits(2) >= plan.tiles);
        return;
      }
      ++launches;
      ASSERT_LE(found.cluster, 8);
      ASSERT_EQ(found.grid, found.cluster * found.tiles);
      ASSERT_LE(found.grid, multiprocessors);
      ASSERT_GE(fits(found.cluster), found.tiles);
      ASSERT_EQ(found.partial_bytes + found.mark_bytes, 0u);
      Deal deal(found);
      deal.run();
      if (testing::Test::HasFatalFailure()) return;
      for (int t = 0; t < found.tiles; ++t) {
        ASSERT_EQ(deal.units[t], found.units) << "tile " << t;
        ASSERT_EQ(deal.owners[t].size(), static_cast<std::size_t>(found.cluster)) << "tile " << t;
        ASSERT_EQ(deal.owners[t].begin()->first, t * found.cluster) << "tile " << t;
        ASSERT_EQ(deal.owners[t].rbegin()->first, (t + 1) * found.cluster - 1) << "tile " << t;
      }
    });
  }
  EXPECT_GT(launches, 1000);
}

}  // namespace
}  // namespace heddle::cuda::linear
