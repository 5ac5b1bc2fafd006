// What a launch tells the kernel.
#pragma once

#include <cstdint>

#include "cuda/any/row_band.h"
#include "cuda/common/divisor.h"
#include "problem/attention.h"

namespace heddle::cuda::sm80::attention_decode {

// A tile is 16 packed query rows of one kv head: row i * G + g of head g of its group. A unit is a tile of a sequence;
// the keys of units are cut into cells, which are dealt out.
struct Params {
  AttentionProblem problem;
  Divisor group;  // G
  Divisor page_size;
  int last_batch;   // of the pages, or of the rows of the cache
  int row_tiles;    // of the longest sequence
  int units;        // of a sequence: Hkv * row_tiles
  int abreast;      // units whose same keys are read by neighbouring CTAs at the same time; divides `units`
  bool uniform;     // all sequences have the same lengths, and none a position of its own
  int least_cells;  // for which a CTA is worth its start
  RowBand band;
  bool q_aligned;           // rows of q may be read in pieces of 16 bytes
  bool score_options;       // softcap, ALiBi, bias or masks
  std::int64_t max_chunks;  // cells of a unit at most, if batch_invariant; else 0
  // Partial results, one slot for each (workspace): rows of o, [slot][tile_rows][kHeadSize], not normalised; their
  // maxima and sums; and whether they are there.
  int tile_rows;
  float* partial_o;
  float2* partial_statistics;  // [slot][16]
  std::uint64_t* ready;        // [slot]
};

}  // namespace heddle::cuda::sm80::attention_decode
