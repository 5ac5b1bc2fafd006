// What a launch tells the kernels.
#pragma once

#include "problem/attention.h"

namespace heddle::cuda::any::attention_baseline {

// Tiles of the score matrix. All kernels see the same ones: what the first does not write, the last does not read.
constexpr int kRows = 128, kKeys = 128;
constexpr int kThreads = 256;

struct Params {
  AttentionProblem problem;
  float* scores;                      // [B, H, Sq, pitch]: S, then P in its place
  std::int64_t pitch;                 // Sk, rounded up to four
  std::int64_t q_tiles, k_tiles;      // of the longest sequence
  bool q_pieces, k_pieces, v_pieces;  // rows may be read in pieces of 16 bytes
  std::uint32_t drop_below;           // a probability whose random word is less is dropped

  constexpr float* row(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return scores + ((b * problem.H + h) * problem.Sq + i) * pitch;
  }
};

}  // namespace heddle::cuda::any::attention_baseline
