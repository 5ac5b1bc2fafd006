// The band and the walks over keys against their definition, pair by pair.
#include "problem/band.h"

#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "problem/key_walk.h"

namespace heddle {
namespace {

using Index = std::int64_t;

// The definition, wide enough for any numbers.
template <class Int>
bool meets(const BasicBand<Int>& band, Index i, Index j) {
  const __int128 distance = __int128{band.key_step} * j - (__int128{band.off} + __int128{band.row_step} * i);
  return -__int128{band.left} <= distance && distance <= __int128{band.right};
}

template <class Int>
std::string described(const BasicBand<Int>& band) {
  const auto side = [](Int x) { return x == BasicBand<Int>::kOpen ? "open" : std::to_string(x); };
  return "off " + std::to_string(band.off) + ", window (" + side(band.left) + ", " + side(band.right) + "), " +
         std::to_string(band.rows) + " rows " + std::to_string(band.row_step) + " apart, " + std::to_string(band.keys) +
         " keys " + std::to_string(band.key_step) + " apart";
}

// Calls f(band) for all small bands.
template <class F>
void for_bands(Index rows, Index keys, const std::vector<Index>& sides, const F& f) {
  for (const Index row_step : {1, 2, 5}) {
    for (const Index key_step : {1, 3, 4}) {
      for (Index off = -7; off <= 7; ++off) {
        for (const Index left : sides) {
          for (const Index right : sides) {
            f(Band{.off = off,
                   .left = left,
                   .right = right,
                   .rows = rows,
                   .keys = keys,
                   .row_step = row_step,
                   .key_step = key_step});
          }
        }
      }
    }
  }
}

const std::vector<Index> kSides = {-3, -1, 0, 1, 2, 4, 9, Band::kOpen};

// The least interval that holds every index for which `wanted` says so.
template <class F>
Interval<Index> least(Index count, const F& wanted) {
  Interval<Index> found;
  for (Index n = 0; n < count; ++n) {
    if (!wanted(n)) continue;
    if (found.empty()) found = {n, n};
    found.end = n + 1;
  }
  return found;
}

bool same(Interval<Index> x, Interval<Index> y) { return x == y || (x.empty() && y.empty()); }

TEST(Band, KeysOfARow) {
  for (const Index keys : {0, 1, 6, 11}) {
    for_bands(6, keys, kSides, [&](const Band& band) {
      for (Index i = 0; i < band.rows; ++i) {
        const KeyRange range = band.keys_of(i);
        ASSERT_TRUE(0 <= range.begin && range.begin <= range.end && range.end <= keys) << described(band);
        for (Index j = 0; j < keys; ++j) {
          ASSERT_EQ(range.holds({j, j + 1}), meets(band, i, j)) << described(band) << ", row " << i << ", key " << j;
        }
      }
    });
  }
}

TEST(Band, KeysOfRows) {
  for_bands(5, 9, kSides, [](const Band& band) {
    for (Index begin = 0; begin <= 5; ++begin) {
      for (Index end = begin; end <= 7; ++end) {  // rows behind the last count for nothing
        const Interval<Index> rows{begin, end}, there = rows.common(band.all_rows());
        const auto meeting = [&](Index j) {
          Index count = 0;
          for (Index i = there.begin; i < there.end; ++i) count += meets(band, i, j) ? 1 : 0;
          return count;
        };
        const KeyRange hull = least(band.keys, [&](Index j) { return meeting(j) > 0; }), met = band.keys_of(rows);
        ASSERT_TRUE(met.holds(hull) || hull.empty()) << described(band);
        // Without gaps between the rows' windows it is the least.
        if (band.left + band.right + 1 >= std::max(band.row_step, band.key_step)) {
          ASSERT_TRUE(same(met, hull)) << described(band) << ", rows " << begin << " to " << end;
        }
        for (Index j = 0; j < band.keys; ++j) {
          const bool by_each = meeting(j) == there.size();
          ASSERT_EQ(band.keys_of_each(rows).holds({j, j + 1}), by_each)
              << described(band) << ", rows " << begin << " to " << end << ", key " << j;
          ASSERT_EQ(band.whole(rows, {j, j + 1}), by_each);
        }
        ASSERT_TRUE(band.whole(rows, {3, 3}));
      }
    }
  });
}

TEST(Band, RowsOfKeys) {
  for_bands(7, 5, kSides, [](const Band& band) {
    for (Index begin = 0; begin < 5; ++begin) {
      for (Index end = begin; end <= 5; ++end) {
        const auto some = [&](Index i) {
          for (Index j = begin; j < end; ++j) {
            if (meets(band, i, j)) return true;
          }
          return false;
        };
        const Interval<Index> hull = least(band.rows, some), met = band.rows_of({begin, end});
        ASSERT_TRUE(met.holds(hull) || hull.empty()) << described(band);
        if (band.left + band.right + 1 >= std::max(band.row_step, band.key_step)) {
          ASSERT_TRUE(same(met, hull)) << described(band) << ", keys " << begin << " to " << end;
        }
      }
    }
  });
}

// Numbers of 32 bits as far out as the band allows, beside the definition in wider ones.
TEST(Band, NearTheLimits) {
  using Narrow = BasicBand<std::int32_t>;
  constexpr std::int32_t kFar = Narrow::kOpen / 2;
  int checked = 0;
  for (const std::int32_t off : {-kFar, -kFar + 5, 0, kFar - 40, kFar / 2}) {
    for (const std::int32_t left : {-Narrow::kOpen, -1, 0, kFar, Narrow::kOpen - 1, Narrow::kOpen}) {
      for (const std::int32_t right : {-Narrow::kOpen, -1, 0, kFar, Narrow::kOpen - 1, Narrow::kOpen}) {
        for (const std::int32_t row_step : {1, 7, kFar / 8}) {
          for (const std::int32_t key_step : {1, 16, kFar / 4}) {
            const Narrow band{off, left, right, 5, 4, row_step, key_step};
            if (std::int64_t{off} + 4 * std::int64_t{row_step} > kFar) continue;
            ++checked;
            for (std::int32_t i = 0; i < band.rows; ++i) {
              for (std::int32_t j = 0; j < band.keys; ++j) {
                ASSERT_EQ(band.keys_of(i).holds({j, j + 1}), meets(band, i, j)) << described(band);
                ASSERT_EQ(band.transposed().keys_of(j).holds({i, i + 1}), meets(band, i, j)) << described(band);
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(checked, 500);
}

TEST(Band, PositionsOf64Bits) {
  constexpr Index kFar = Band::kOpen / 2;
  for (const Index off : {-kFar, kFar - 1000, Index{0}}) {
    for (const Index left : {Index{0}, Index{3}, kFar, Band::kOpen}) {
      for (const Index right : {Index{0}, Index{3}, kFar, Band::kOpen}) {
        const Band band{.off = off, .left = left, .right = right, .rows = 100, .keys = kFar};
        for (const Index i : {0, 1, 99}) {
          const KeyRange range = band.keys_of(i);
          for (const Index j : {Index{0}, Index{1}, off + i - 4, off + i - 3, off + i, off + i + 3, off + i + 4,
                                range.begin - 1, range.begin, range.end - 1, range.end, kFar - 1}) {
            if (j < 0 || j >= band.keys) continue;
            ASSERT_EQ(range.holds({j, j + 1}), meets(band, i, j)) << described(band) << ", row " << i << ", key " << j;
          }
        }
      }
    }
  }
}

TEST(Band, TilesOf) {
  for (Index size = 1; size <= 5; ++size) {
    for (Index begin = 0; begin <= 12; ++begin) {
      for (Index end = begin; end <= 12; ++end) {
        const auto some = [&](Index tile) { return tile * size < end && (tile + 1) * size > begin && begin < end; };
        ASSERT_TRUE(same(tiles_of<Index>({begin, end}, size), least(20, some))) << begin << ", " << end << ", " << size;
      }
    }
  }
}

// What a walk says must be: each key that a row meets is in one tile of those listed, in ascending order, and a tile is
// whole exactly where nothing is to be masked.
template <TileWalk W>
void check_walk(const W& walk, const Band& band, Interval<Index> rows, KeyRange keys, Index size,
                const std::vector<std::int32_t>& listed) {
  std::vector<bool> there(static_cast<std::size_t>(band.keys));
  Index last = -1;
  for (Index n = 0; n < walk.count(); ++n) {
    const KeyRange tile = walk.tile(n);
    ASSERT_TRUE(!tile.empty() && tile.begin % size == 0 && tile.size() <= size && tile.begin > last) << described(band);
    ASSERT_TRUE(std::ranges::find(listed, tile.begin / size) != listed.end());
    ASSERT_TRUE(keys.holds(tile));
    bool whole = true;
    for (Index j = tile.begin; j < tile.end; ++j) {
      there[static_cast<std::size_t>(j)] = true;
      for (Index i = rows.begin; i < rows.end; ++i) whole &= meets(band, i, j);
    }
    ASSERT_EQ(walk.whole(n), whole) << described(band) << ", tile at key " << tile.begin;
    last = tile.begin;
  }
  // Kernels on a GPU count through steps(), which tell the same.
  const Interval<Index> steps = walk.steps();
  ASSERT_EQ(steps.size(), walk.count());
  for (Index step = steps.begin; step < steps.end; ++step) {
    const Index n = step - steps.begin;
    ASSERT_EQ(walk.index(step), walk.tile(n).begin / size);
    ASSERT_EQ(walk.whole_tile(walk.index(step)), walk.whole(n));
    ASSERT_EQ(walk.whole_steps().begin <= step && step < walk.whole_steps().end, walk.whole(n)) << described(band);
  }
  for (Index j = keys.begin; j < keys.end; ++j) {
    if (std::ranges::find(listed, j / size) == listed.end()) continue;
    for (Index i = rows.begin; i < rows.end; ++i) {
      if (!meets(band, i, j)) continue;
      ASSERT_TRUE(there[static_cast<std::size_t>(j)]) << described(band) << ", key " << j;
    }
  }
}

TEST(KeyWalk, GoesThroughWhatRowsMeet) {
  const std::vector<std::vector<std::int32_t>> lists = {{}, {0}, {2}, {0, 1, 2, 3, 4}, {1, 3}, {0, 2, 4}};
  for_bands(4, 13, {-1, 0, 2, Band::kOpen}, [&](const Band& band) {
    for (const Interval<Index> rows : {Interval<Index>{0, 4}, {1, 3}, {3, 4}}) {
      for (const Index size : {3, 4}) {
        for (const KeyRange keys : {KeyRange{0, 13}, {size, 2 * size}, {2 * size, 13}}) {
          const BandWalk<Index> walk(band, rows, keys, size);
          check_walk(walk, band, rows, keys, size, {0, 1, 2, 3, 4});
          for (const auto& list : lists) {
            check_walk(ListWalk<Index>(list.data(), static_cast<Index>(list.size()), walk), band, rows, keys, size,
                       list);
          }
          // A list of all tiles is the band's walk.
          const ListWalk<Index> all(lists[3].data(), 5, walk);
          ASSERT_EQ(all.count(), walk.count());
          for (Index n = 0; n < walk.count(); ++n) ASSERT_EQ(all.tile(n), walk.tile(n));
        }
      }
    }
  });
}

TEST(KeyWalk, TakesOneStepWhereThereIsNone) {
  const std::vector<std::int32_t> list = {0, 2};
  const BandWalk<Index> band({.off = 0, .right = 0, .rows = 10, .keys = 20}, {0, 10}, {0, 20}, 4);
  const auto one_step = [](auto walk) {
    const Index count = walk.count();
    walk.take_one_step();
    EXPECT_EQ(walk.count(), std::max<Index>(count, 1));
    return walk;
  };
  EXPECT_EQ(one_step(band).tile(2), (KeyRange{8, 10}));
  EXPECT_EQ(one_step(ListWalk<Index>(list.data(), 2, band)).tile(1), (KeyRange{8, 10}));
  // Behind the tiles that rows meet: nothing of it is met, and it is not whole.
  const auto none = one_step(ListWalk<Index>(list.data(), 0, band));
  EXPECT_EQ(none.index(0), 3);
  EXPECT_FALSE(none.whole(0));
  const BandWalk<Index> no_keys({.off = 0, .right = -1, .rows = 1, .keys = 20}, {0, 1}, {0, 20}, 4);
  EXPECT_EQ(no_keys.count(), 0);
  EXPECT_FALSE(one_step(no_keys).whole(0));
  EXPECT_FALSE(one_step(ListWalk<Index>(list.data(), 2, no_keys)).whole(0));
}

TEST(KeyWalk, HasNoWholeTilesWhereAllAreMasked) {
  const std::vector<std::int32_t> list = {0, 2};
  BandWalk<Index> band({.rows = 10, .keys = 20}, {0, 10}, {0, 20}, 4);
  ListWalk<Index> listed(list.data(), 2, band);
  EXPECT_TRUE(band.whole(4) && listed.whole(1));
  band.mask_all();
  listed.mask_all();
  EXPECT_TRUE(band.whole_steps().empty() && listed.whole_steps().empty());
  EXPECT_FALSE(band.whole(4) || listed.whole(1));
}

// Over the transposed band: the tiles of rows that keys go through in a backward.
TEST(KeyWalk, GoesThroughRowsThatMeetKeys) {
  const std::vector<std::int32_t> list = {0, 2, 3};
  for_bands(13, 5, {-1, 0, 2, Band::kOpen}, [&](const Band& band) {
    const Band transposed = band.transposed();
    for (Index i = 0; i < band.rows; ++i) {
      for (Index j = 0; j < band.keys; ++j) ASSERT_EQ(meets(transposed, j, i), meets(band, i, j)) << described(band);
    }
    for (const KeyRange keys : {KeyRange{0, 5}, {1, 3}, {4, 5}}) {
      for (const Interval<Index> rows : {band.all_rows(), Interval<Index>{4, 8}}) {
        const BandWalk<Index> walk(transposed, keys, rows, 4);
        check_walk(walk, transposed, keys, rows, 4, {0, 1, 2, 3});
        check_walk(ListWalk<Index>(list.data(), 3, walk), transposed, keys, rows, 4, list);
      }
    }
  });
}

// Usable where kernels are compiled: no host code in it.
static_assert(BasicBand<int>{.off = 4, .right = 0, .rows = 3, .keys = 7}.keys_of(2).end == 7);
static_assert(TileWalk<BandWalk<int>> && TileWalk<ListWalk<int>>);
static_assert(BandWalk<int>({.off = 0, .right = 0, .rows = 8, .keys = 8}, {4, 8}, {0, 8}, 4).count() == 2);

}  // namespace
}  // namespace heddle
