// What a step of native sparse attention is told. Made on the host.
#pragma once

#include <cstddef>

#include "cuda/common/divisor.h"
#include "problem/nsa_step.h"

namespace heddle::cuda::sm90::nsa_step {

constexpr int kThreads = 256, kWarp = 32, kWarps = kThreads / kWarp;
constexpr int kRows = 16;      // of a matrix product: query heads of a group
constexpr int kTileKeys = 16;  // that a warp meets at a time
constexpr int kMostSlots = kWarp;
constexpr int kMostCluster = 8;
constexpr int kMostHead = 128;

enum Branch { kCmp, kSwa, kSlc, kBranches };  // in the order of their sums

struct Params {
  NsaStepProblem problem;
  float* scores;    // [units][G][score_pitch], in log2 units
  int score_pitch;  // pooled keys, whole tiles of them
  int cluster;      // CTAs of a unit
  int block_log2;
  float scale_log2;
  Divisor by_page, by_pooled_page;  // of a cache in pages: keys, and pooled keys, of a page
  bool wide_in;                     // rows of q, k_new and v_new can be read in pieces of 16 bytes
  bool wide_out;                    // and out's be written so

  // Where row `row` of sequence b is: the page, or the sequence, and the row there.
  constexpr AttentionProblem::Slot place(std::int64_t b, int row, const Divisor& of_page) const {
    if (problem.page_table == nullptr) return {b, row};
    const int page = of_page.quotient(row);
    return {clamped(problem.page_table[b * problem.page_table_stride + page], 0, problem.pages - 1),
            row - page * static_cast<int>(of_page.divisor)};
  }
};

}  // namespace heddle::cuda::sm90::nsa_step
