// Where keys lie in a tile in shared memory: rows of 128 bytes, [panel][box][head][key]; 16-byte chunk c of row r lies
// at chunk c ^ (r % 8). The boxes' pitch makes 8 neighbouring keys differ in r % 8, so that their chunks lie in
// different banks.
#pragma once

#include "cuda/sm90/attention_decode/config.h"

namespace heddle::cuda::sm90::attention_decode {

// Rows of one kv head's keys.
struct KeyRows {
  int pitch, shift, mask, head_row;
  __device__ KeyRows(const Plan& plan, int head)
      : pitch(plan.box_pitch), shift(plan.box_shift), mask(plan.box - 1), head_row(head * plan.box) {}
  __device__ int row(int key) const { return (key >> shift) * pitch + head_row + (key & mask); }
};

__device__ inline std::uint32_t chunk_address(std::uint32_t panel, int row, int chunk) {
  return panel + row * kPanel + ((chunk ^ (row & 7)) << 4);
}

}  // namespace heddle::cuda::sm90::attention_decode
