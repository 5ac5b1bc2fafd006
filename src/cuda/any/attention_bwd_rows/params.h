// What a launch tells the kernels.
#pragma once

#include <vector_types.h>

#include "cuda/any/attention_bwd_rows/layout.h"

namespace heddle::cuda::any::attention_bwd_rows {

// Where the results go. A row that attends no key, by lengths or by its lse, has lse_log2 = +inf: so P = exp2(s -
// lse_log2) is 0. What lies in q, dO and O of such a row is not read here and may be anything.
struct Rows {
  float* lse_log2;  // lse * log2(e), or what large_rows.cuh says
  float* delta;     // sum over d of dO * O, less d_lse; 0 for rows without keys
  float* largest;   // logit of rows that large_rows.cuh is about; null: there are none, as there is no bias
  uint4* sums;      // cleared: words_per_row words of 16 bytes for each row. May be null
  std::int64_t words_per_row;
  Operand d_o = {};  // rounded_d_o(), where rounds_d_o() says so: zeros for rows without keys
};

struct Params {
  AttentionBackwardProblem problem;
  Rows rows;
  unsigned blocks_per_sequence;  // and head, of the kernel at hand
  int lanes;                     // that read a row: 8, 16 or 32
  bool in_pieces;                // rows of o and d_o may be read in pieces of 16 bytes
};

}  // namespace heddle::cuda::any::attention_bwd_rows
