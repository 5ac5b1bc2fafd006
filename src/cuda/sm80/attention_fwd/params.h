// What a launch tells the kernel.
#pragma once

#include <cstdint>

#include "cuda/any/attention_int8_qk/layout.h"
#include "cuda/common/divisor.h"
#include "problem/attention.h"

namespace heddle::cuda::sm80::attention_fwd {

// For each tile of query rows of each head a list of tiles of keys, for kernels whose walk is a ListWalk.
struct TileLists {
  const std::int32_t* tiles;   // [B, H, q_tiles, length]
  const std::int32_t* counts;  // [B, H, q_tiles]
  std::int64_t length;
};

struct Params {
  AttentionProblem problem;
  Divisor heads, group;   // H, G
  int units;              // B * H
  int q_tiles;            // of the longest sequence
  Divisor section;        // heads whose keys and values the L2 cache holds together
  Divisor section_tiles;  // section * q_tiles
  Divisor page_size;
  // Row i attends keys j with i + off - left <= j <= i + off + right.
  int left, right;
  float scale_log2;                     // scale * log2(e)
  bool bias_pairs, mask_pairs;          // two columns may be read at once
  bool o_aligned;                       // rows of o may be written in pieces of 16 bytes
  std::uint32_t drop_below;             // a probability whose random word is less is dropped
  any::attention_int8_qk::Codes codes;  // of q and k, where they are multiplied in 8 bits
  TileLists lists;
};

constexpr int kOpen = 1 << 30;  // a window without an edge
constexpr float kLog2e = 1.44269504088896341f;

}  // namespace heddle::cuda::sm80::attention_fwd
