#include "patterns/tiles.h"

#include <algorithm>
#include <limits>

namespace heddle {
namespace {

constexpr std::int64_t kEverywhere = std::numeric_limits<std::int64_t>::max() / 4;

std::int64_t floor_div(std::int64_t x, std::int64_t y) { return x / y - (x % y < 0 ? 1 : 0); }

// Keys [begin, end) that a part may name at all, for a run of rows; more than it does, never less.
struct Reach {
  std::int64_t begin, end;
};

Reach reach_of(const PatternNode& node, const PatternRows& rows) {
  const std::int64_t first = rows.position, last = rows.position + rows.rows - 1;
  const auto& n = node.numbers;
  switch (node.kind) {
    case PatternKind::local:
      return {first - n[0], last + n[1] + 1};
    case PatternKind::dilated: {
      const std::int64_t far = n[0] * n[1];  // of 31 bits each
      return {first - far, last + far + 1};
    }
    case PatternKind::sink:
      return {0, n[0]};
    case PatternKind::columns:
      return {n.front(), n.back() + 1};
    case PatternKind::diagonals:
      return {first - n.back(), last - n.front() + 1};
    case PatternKind::rows: {
      const auto at = std::ranges::lower_bound(n, first);
      return at != n.end() && *at <= last ? Reach{0, kEverywhere} : Reach{0, 0};
    }
    case PatternKind::either: {
      Reach all = reach_of(*node.parts[0], rows);
      for (const auto& part : node.parts) {
        const Reach one = reach_of(*part, rows);
        all = {std::min(all.begin, one.begin), std::max(all.end, one.end)};
      }
      return all;
    }
    case PatternKind::both: {
      Reach all = reach_of(*node.parts[0], rows);
      for (const auto& part : node.parts) {
        const Reach one = reach_of(*part, rows);
        all = {std::max(all.begin, one.begin), std::min(all.end, one.end)};
      }
      return all;
    }
    default:
      return {0, kEverywhere};
  }
}

// The same rows, asked for no blocks beyond the part's reach.
PatternRows within(const PatternNode& node, PatternRows rows) {
  const Reach reach = reach_of(node, rows);
  if (reach.begin >= reach.end) {
    rows.last = rows.first;
    return rows;
  }
  rows.first = std::max(rows.first, floor_div(reach.begin, rows.block_size));
  rows.last = std::min(rows.last, floor_div(reach.end - 1, rows.block_size) + 1);
  return rows;
}

void add(std::vector<PatternTile>& out, std::int64_t block, MaskId mask) {
  if (mask != kNoTile) out.push_back({static_cast<std::int32_t>(block), mask});
}

std::vector<PatternTile> either(MaskPool& pool, const std::vector<PatternTile>& a, const std::vector<PatternTile>& b) {
  std::vector<PatternTile> out;
  out.reserve(a.size() + b.size());
  auto x = a.begin(), y = b.begin();
  while (x != a.end() || y != b.end()) {
    if (y == b.end() || (x != a.end() && x->block < y->block)) {
      out.push_back(*x++);
    } else if (x == a.end() || y->block < x->block) {
      out.push_back(*y++);
    } else {
      add(out, x->block, pool.either(x->mask, y->mask));
      ++x, ++y;
    }
  }
  return out;
}

std::vector<PatternTile> both(MaskPool& pool, const std::vector<PatternTile>& a, const std::vector<PatternTile>& b) {
  std::vector<PatternTile> out;
  auto y = b.begin();
  for (const PatternTile& x : a) {
    while (y != b.end() && y->block < x.block) ++y;
    if (y != b.end() && y->block == x.block) add(out, x.block, pool.both(x.mask, y->mask));
  }
  return out;
}

// Calls visit(block) for the blocks of keys [begin, end) that were asked for and are behind `done`, and moves that on.
template <class Visit>
void visit_blocks(const PatternRows& rows, std::int64_t begin, std::int64_t end, std::int64_t& done,
                  const Visit& visit) {
  const std::int64_t to = std::min(floor_div(end - 1, rows.block_size) + 1, rows.last);
  for (done = std::max({done, floor_div(begin, rows.block_size), rows.first}); done < to; ++done) visit(done);
}

}  // namespace

template <class Make>
MaskId PatternTiles::known(const PatternNode& node, std::int64_t key, const Make& make) {
  const auto [at, fresh] = known_.try_emplace({&node, key}, kNoTile);
  if (fresh) at->second = make();
  return at->second;
}

PatternTiles::Tiles PatternTiles::tiles(const PatternNode& node, PatternRows rows) {
  rows = within(node, rows);
  Tiles out;
  if (rows.first >= rows.last) return out;
  const auto& n = node.numbers;
  const std::int64_t size = rows.block_size;
  switch (node.kind) {
    case PatternKind::either:
    case PatternKind::both:
      for (const auto& part : node.parts) {
        Tiles one = tiles(*part, rows);
        out = part == node.parts.front()         ? std::move(one)
              : node.kind == PatternKind::either ? heddle::either(pool_, out, one)
                                                 : heddle::both(pool_, out, one);
      }
      return out;
    case PatternKind::sink:
      for (std::int64_t c = rows.first; c < rows.last; ++c) {
        const std::int64_t left = std::min(n[0] - c * size, size);
        add(out, c, known(node, left, [&] { return pool_.make([&](auto, auto j) { return j < left; }); }));
      }
      return out;
    case PatternKind::columns: {
      std::int64_t done = rows.first;
      for (auto at = std::ranges::lower_bound(n, rows.first * size); at != n.end(); ++at) {
        visit_blocks(rows, *at, *at + 1, done, [&](std::int64_t c) {
          add(out, c, known(node, c, [&] {
                return pool_.make([&](auto, auto j) { return std::ranges::binary_search(n, c * size + j); });
              }));
        });
        if (done >= rows.last) break;
      }
      return out;
    }
    case PatternKind::rows: {
      const MaskId mask = pool_.make([&](auto r, auto) { return std::ranges::binary_search(n, rows.position + r); });
      for (std::int64_t c = rows.first; c < rows.last; ++c) add(out, c, mask);
      return out;
    }
    case PatternKind::random:
      return of_random(node, rows);
    default:
      return of_distances(node, rows);
  }
}

// A tile of these is a matter of how far its first row and its first key are apart.
PatternTiles::Tiles PatternTiles::of_distances(const PatternNode& node, const PatternRows& rows) {
  Tiles out;
  const std::int64_t size = rows.block_size, p = rows.position;
  const auto tile = [&](std::int64_t c) {
    const std::int64_t apart = p - c * size;
    std::int64_t key = apart;
    if (node.kind == PatternKind::strided) key = apart - floor_div(apart, node.numbers[0]) * node.numbers[0];
    add(out, c, known(node, key, [&] {
          return pool_.make([&](auto r, auto j) { return keeps_distance(node, apart + r - j); });
        }));
  };
  std::int64_t done = rows.first;
  // Keys p - distance and on, a run for each distance, from the farthest back on; so blocks ascend.
  const auto run = [&](std::int64_t distance) {
    visit_blocks(rows, p - distance, p - distance + rows.rows, done, tile);
  };
  if (node.kind == PatternKind::diagonals) {
    for (auto d = node.numbers.rbegin(); d != node.numbers.rend() && done < rows.last; ++d) run(*d);
    return out;
  }
  const std::int64_t step = node.kind == PatternKind::local     ? 1
                            : node.kind == PatternKind::strided ? node.numbers[0]
                                                                : node.numbers[1];
  if (step < rows.rows + size) {  // every tile within reach has some
    for (std::int64_t c = rows.first; c < rows.last; ++c) tile(c);
    return out;
  }
  for (std::int64_t d = floor_div(p + rows.rows - 1 - rows.first * size, step) * step; done < rows.last; d -= step)
    run(d);
  return out;
}

PatternTiles::Tiles PatternTiles::of_random(const PatternNode& node, const PatternRows& rows) {
  const std::int64_t size = node.numbers[1];
  struct Drawn {
    std::int64_t begin, end;  // rows of the tile
    std::vector<std::int64_t> blocks;
  };
  std::vector<Drawn> all;
  for (std::int64_t r = 0; r < rows.rows;) {
    const std::int64_t row_block = (rows.position + r) / size;
    const std::int64_t end = std::min(rows.rows, (row_block + 1) * size - rows.position);
    all.push_back({r, end, drawn_blocks(node, rows.length, rows.causal, rows.head, row_block)});
    r = end;
  }
  std::map<std::int64_t, bool> named;  // blocks of keys
  for (const Drawn& one : all) {
    for (const std::int64_t block : one.blocks) {
      std::int64_t done = rows.first;
      visit_blocks(rows, block * size, (block + 1) * size, done, [&](std::int64_t c) { named[c] = true; });
    }
  }
  Tiles out;
  for (const auto& [c, there] : named) {
    const bool aligned = all.size() == 1 && size % rows.block_size == 0;
    add(out, c, aligned ? kWholeTile : pool_.make([&, c = c](auto r, auto j) {
      const auto one = std::ranges::find_if(all, [&](const Drawn& each) { return r < each.end; });
      return std::ranges::binary_search(one->blocks, (c * rows.block_size + j) / size);
    }));
  }
  return out;
}

}  // namespace heddle
