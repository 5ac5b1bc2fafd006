// Patterns of adaptive sparse attention as sets of tiles: which blocks of keys a block of rows meets. What they select
// is heddle.nn's, tile for tile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "heddle/asam.h"
#include "heddle/runtime.h"
#include "model/asam_state.h"

namespace heddle {

// Parameters of patterns; those of patterns that the layer does not have are empty.
struct AsamSelectionWeights {
  std::vector<float> centroids;      // [H, clusters, D], of unit length
  std::vector<std::uint8_t> scaled;  // [H, 2^scales]: whether a tile of these scales, bit by bit, is attended
  std::vector<float> head_bias;      // [H, 4]

  static AsamSelectionWeights make(AsamStateReader& state, const AsamConfig& config, const std::string& prefix);
  std::size_t bytes() const;
};

// A block of rows of a head.
struct AsamBlock {
  std::int64_t b = 0, head = 0, n = 0;
};

// q or k of a call, f32 [B, T, H, D] with D contiguous.
struct AsamRows {
  const float* data = nullptr;
  std::int64_t row_stride = 0;
};

class AsamSelection {
 public:
  // batch sequences of `length` positions, the first lengths[b] of them in use, all if lengths is null.
  AsamSelection(const AsamConfig& config, const AsamSelectionWeights& weights, std::int64_t batch, std::int64_t length,
                const std::int32_t* lengths)
      : config_(config), weights_(weights), batch_(batch), length_(length), lengths_(lengths) {}

  bool clusters() const {
    return config_.pattern_type == AsamPattern::clustered || config_.pattern_type == AsamPattern::adaptive;
  }
  // N.
  std::int64_t tiles() const { return (length_ + config_.block_size - 1) / config_.block_size; }
  // The blocks of keys that causality and lengths leave of a block of rows: [0, left).
  std::int64_t left(std::int64_t b, std::int64_t n) const;
  // The most that `pattern` selects of them.
  std::int64_t most(AsamPattern pattern) const;
  // Positions of block n that are in use.
  std::int64_t positions(std::int64_t b, std::int64_t n) const;
  // Pairs of a row and a key, both in use, in a tile that is left.
  std::int64_t pairs(std::int64_t b, std::int64_t n, std::int64_t c) const;

  // Writes the cluster of each block of rows and of keys, [B, N, H].
  void find_clusters(Executor& executor, const AsamRows& q, const AsamRows& k, std::int32_t* of_rows,
                     std::int32_t* of_keys) const;
  // Sets kept[c] for the blocks c that are left. of_rows, of_keys: as above, where the layer has clusters. ranks: [N].
  void mark(AsamPattern pattern, const AsamBlock& block, const std::int32_t* of_rows, const std::int32_t* of_keys,
            std::uint8_t* kept, std::uint64_t* ranks) const;

 private:
  std::int64_t used(std::int64_t b) const { return lengths_ == nullptr ? length_ : std::int64_t{lengths_[b]}; }
  std::int64_t reach() const;
  std::int64_t drawn() const;
  void draw(const AsamBlock& block, std::int64_t left, std::uint8_t* kept, std::uint64_t* ranks) const;
  std::int32_t nearest(const AsamRows& rows, std::int64_t b, std::int64_t head, std::int64_t first,
                       std::int64_t count) const;

  const AsamConfig& config_;
  const AsamSelectionWeights& weights_;
  const std::int64_t batch_, length_;
  const std::int32_t* lengths_;
};

}  // namespace heddle
