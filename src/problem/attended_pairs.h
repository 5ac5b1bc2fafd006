// How much a call computes, for estimates and for figures of speed.
#pragma once

#include "problem/attention.h"

namespace heddle {

// Pairs that a band holds, of at most so many rows, evenly spread, each of which then stands for those around it.
double attended_pairs(const Band& band, std::int64_t most_rows);

// Those that causality and window leave in one head of one sequence of Sq rows and Sk keys, from at most 64 rows:
// lengths that lie on a GPU are not known on the host.
double attended_pairs(const AttentionProblem& p);

}  // namespace heddle
