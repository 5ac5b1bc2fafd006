// What the CTA of a kernel knows of its tile of query rows.
#pragma once

#include "cuda/sm80/attention/params.h"
#include "problem/band.h"

namespace heddle::cuda::sm80::attention {

// Which head of which sequence, and which query tile of it.
struct Work {
  int b, h;
  int first;                // position of the tile's row 0 in its sequence
  int q_rows, sq, sk, off;  // as in Sequence
  int q_row, k_slot;        // of position 0 and key 0 in their storage
  const std::byte *k, *v;   // this head's: key 0; in a paged cache, slot 0 of page 0
};

// Which pairs of the sequence meet.
__device__ inline BasicBand<int> band_of(const Params& p, const Work& w) {
  return {.off = w.off,
          .left = p.left,
          .right = p.right,
          .rows = w.sq,
          .keys = w.sk,
          .row_step = p.row_step,
          .key_step = static_cast<int>(p.key_step.divisor)};
}

}  // namespace heddle::cuda::sm80::attention
