// What a launch tells the kernel.
#pragma once

#include "cuda/any/linear/params.h"

namespace heddle::cuda::sm80::linear {

using cuda::linear::Output, cuda::linear::Schedule;

struct Params {
  const void* x;  // [m, k], rows x_stride elements apart and aligned to 16 bytes
  std::int64_t x_stride;
  int k;
  const std::byte* weights;  // blocks of block_bytes
  int block_bytes;
  int group_shift;    // 2^group_shift pairs of steps, of 32 columns, share a scale in a block: 0, 1 or 2
  int zeros;          // where zero points lie in a block; 0: there are none
  int stages;         // 2, 3, 4 or 6
  int lookup_copies;  // of the table, one for each lane or less: 32 or 8
  float lookup[16];   // what codes stand for, where a table says it
  Output out;
  Schedule schedule;
};

}  // namespace heddle::cuda::sm80::linear
