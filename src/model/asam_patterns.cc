#include "model/asam_patterns.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>

#include "core/parallel.h"

namespace heddle {
namespace {

// The rank of a block of keys among those that a head's block of rows may draw, each another: a hash of 32 bits, 24 of
// the block's number below it.
std::uint64_t rank_of(std::uint64_t seed, std::uint64_t head, std::uint64_t n, std::uint64_t c) {
  std::uint64_t word = ((seed % 65537 * 4096 + head) * 65537 + n) * 65537 + c;
  for (const std::uint64_t multiplier : {0x7FEB352Dull, 0x046CA68Bull}) {
    word &= 0xFFFFFFFFull;
    word = (word ^ (word >> 16)) * multiplier;
  }
  return ((word >> 8) & 0xFFFFFFFFull) << 24 | c;
}

// Whether a head attends tiles of exactly these scales: they have more than half of softmax(scale_weights).
std::vector<std::uint8_t> scaled_tiles(const std::vector<float>& scale_weights, std::size_t scales, std::size_t heads) {
  std::vector<std::uint8_t> out(heads << scales);
  for (std::size_t h = 0; h < heads; ++h) {
    std::array<float, 4> shares{};
    float largest = -INFINITY, sum = 0;
    for (std::size_t s = 0; s < scales; ++s) largest = std::max(largest, scale_weights[s * heads + h]);
    for (std::size_t s = 0; s < scales; ++s) sum += shares[s] = std::exp(scale_weights[s * heads + h] - largest);
    for (std::size_t code = 0; code < std::size_t{1} << scales; ++code) {
      float total = 0;
      for (std::size_t s = 0; s < scales; ++s) total += (code >> s & 1) != 0 ? shares[s] / sum : 0.0f;
      out[(h << scales) + code] = total > 0.5f;
    }
  }
  return out;
}

}  // namespace

AsamSelectionWeights AsamSelectionWeights::make(AsamStateReader& state, const AsamConfig& config,
                                                const std::string& prefix) {
  AsamSelectionWeights out;
  const std::int64_t heads = config.num_heads, size = config.dim_head;
  const bool adaptive = config.pattern_type == AsamPattern::adaptive;
  if (adaptive || config.pattern_type == AsamPattern::clustered) {
    out.centroids = state.values(prefix + "centroids", {heads, config.num_clusters, size});
    for (std::int64_t i = 0; i < heads * config.num_clusters; ++i) {
      float* centroid = out.centroids.data() + i * size;
      double squares = 0;
      for (std::int64_t d = 0; d < size; ++d) squares += static_cast<double>(centroid[d]) * centroid[d];
      const double length = std::max(std::sqrt(squares), 1e-12);
      for (std::int64_t d = 0; d < size; ++d) centroid[d] = static_cast<float>(centroid[d] / length);
    }
    state.leave(prefix + "temperature");  // which centroid is nearest does not ask it
  }
  if (config.pattern_type == AsamPattern::hierarchical) {
    const auto scales = static_cast<std::int64_t>(config.scales.size());
    out.scaled = scaled_tiles(state.values(prefix + "scale_weights", {scales, heads}), config.scales.size(),
                              static_cast<std::size_t>(heads));
  }
  if (adaptive) out.head_bias = state.values(prefix + "head_bias", {heads, kAsamChoices});
  return out;
}

std::size_t AsamSelectionWeights::bytes() const {
  return sizeof(float) * (centroids.size() + head_bias.size()) + scaled.size();
}

std::int64_t AsamSelection::left(std::int64_t b, std::int64_t n) const {
  const std::int64_t in_use = (used(b) + config_.block_size - 1) / config_.block_size;
  return config_.causal ? std::min(n + 1, in_use) : in_use;
}

// Blocks to either side that hold keys within half a window of some row of a block.
std::int64_t AsamSelection::reach() const {
  const std::int64_t distance = config_.window_size / 2;
  return distance < 1 ? 0 : (distance - 1) / config_.block_size + 1;
}

std::int64_t AsamSelection::drawn() const { return (config_.num_random + config_.block_size - 1) / config_.block_size; }

std::int64_t AsamSelection::most(AsamPattern pattern) const {
  const std::int64_t all = tiles();
  switch (pattern) {
    case AsamPattern::local:
      return std::min(all, 2 * reach() + 1);
    case AsamPattern::strided:
      return std::min(all, (all + config_.stride - 1) / config_.stride + 3);
    case AsamPattern::random:
      return std::min(all, drawn());
    default:
      return all;
  }
}

std::int64_t AsamSelection::positions(std::int64_t b, std::int64_t n) const {
  return std::clamp<std::int64_t>(used(b) - n * config_.block_size, 0, config_.block_size);
}

std::int64_t AsamSelection::pairs(std::int64_t b, std::int64_t n, std::int64_t c) const {
  const std::int64_t rows = positions(b, n), keys = positions(b, c);
  return config_.causal && n == c ? rows * (rows + 1) / 2 : rows * keys;
}

// Of the mean of some rows of a head; the first centroid if there are none.
std::int32_t AsamSelection::nearest(const AsamRows& rows, std::int64_t b, std::int64_t head, std::int64_t first,
                                    std::int64_t count) const {
  const std::int64_t size = config_.dim_head;
  std::array<double, kAsamHeadSize> mean{};  // times the number of rows, which is no matter
  for (std::int64_t i = first; i < first + count; ++i) {
    const float* row = rows.data + (b * length_ + i) * rows.row_stride + head * size;
    for (std::int64_t d = 0; d < size; ++d) mean[static_cast<std::size_t>(d)] += static_cast<double>(row[d]);
  }
  std::int32_t found = 0;
  double largest = -INFINITY;
  for (std::int64_t cluster = 0; cluster < config_.num_clusters; ++cluster) {
    const float* centroid = weights_.centroids.data() + (head * config_.num_clusters + cluster) * size;
    double likeness = 0;
    for (std::int64_t d = 0; d < size; ++d) {
      likeness += mean[static_cast<std::size_t>(d)] * static_cast<double>(centroid[d]);
    }
    if (likeness > largest) {
      largest = likeness;
      found = static_cast<std::int32_t>(cluster);
    }
  }
  return found;
}

void AsamSelection::find_clusters(Executor& executor, const AsamRows& q, const AsamRows& k, std::int32_t* of_rows,
                                  std::int32_t* of_keys) const {
  const std::int64_t heads = config_.num_heads, blocks = tiles();
  parallel_for(executor, batch_ * blocks, [&](std::int64_t index, int) {
    const std::int64_t b = index / blocks, n = index % blocks, first = n * config_.block_size;
    for (std::int64_t h = 0; h < heads; ++h) {
      // With causality a block of rows goes by its first row, before which all other blocks that it may meet end.
      of_rows[index * heads + h] = nearest(q, b, h, first, config_.causal ? 1 : positions(b, n));
      of_keys[index * heads + h] = nearest(k, b, h, first, positions(b, n));
    }
  });
}

void AsamSelection::draw(const AsamBlock& block, std::int64_t left, std::uint8_t* kept, std::uint64_t* ranks) const {
  const std::int64_t wanted = drawn();
  if (left <= wanted) {
    std::fill_n(kept, left, std::uint8_t{1});
    return;
  }
  const auto rank = [&](std::int64_t c) {
    return rank_of(static_cast<std::uint64_t>(config_.seed), static_cast<std::uint64_t>(block.head),
                   static_cast<std::uint64_t>(block.n), static_cast<std::uint64_t>(c));
  };
  for (std::int64_t c = 0; c < left; ++c) ranks[c] = rank(c);
  std::nth_element(ranks, ranks + wanted - 1, ranks + left);
  for (std::int64_t c = 0; c < left; ++c) kept[c] = rank(c) <= ranks[wanted - 1];
}

void AsamSelection::mark(AsamPattern pattern, const AsamBlock& block, const std::int32_t* of_rows,
                         const std::int32_t* of_keys, std::uint8_t* kept, std::uint64_t* ranks) const {
  const std::int64_t n = block.n, left = this->left(block.b, n);
  const auto where = [&](const auto& holds) {
    for (std::int64_t c = 0; c < left; ++c) kept[c] = holds(c);
  };
  switch (pattern) {
    case AsamPattern::local:
      return where([&, reach = reach()](std::int64_t c) { return std::abs(n - c) <= reach; });
    case AsamPattern::strided:
      return where([&](std::int64_t c) { return c % config_.stride == 0 || std::abs(n - c) <= 1; });
    case AsamPattern::random:
      return draw(block, left, kept, ranks);
    case AsamPattern::clustered: {
      const std::int64_t heads = config_.num_heads, first = block.b * tiles();
      const std::int32_t own = of_rows[(first + n) * heads + block.head];
      return where([&](std::int64_t c) { return c == n || of_keys[(first + c) * heads + block.head] == own; });
    }
    default: {  // hierarchical: adaptive is one of the first four, block by block
      const std::size_t scales = config_.scales.size();
      const std::uint8_t* scaled = weights_.scaled.data() + (static_cast<std::size_t>(block.head) << scales);
      return where([&](std::int64_t c) {
        std::size_t code = 0;
        for (std::size_t s = 0; s < scales; ++s) {
          const std::int64_t scale = config_.scales[s];
          if (c % scale == 0 || std::abs(n - c) <= scale / 4) code |= std::size_t{1} << s;
        }
        return scaled[code] != 0;
      });
    }
  }
}

}  // namespace heddle
