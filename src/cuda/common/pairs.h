// How much a call computes, for estimates.
#pragma once

#include "problem/attention.h"

namespace heddle::cuda {

// Keys that the rows of one head attend by causality and window, in sequences of Sq rows and Sk keys: lengths that lie
// on the GPU are not known here. From at most 64 rows.
double attended_pairs(const AttentionProblem& p);

}  // namespace heddle::cuda
