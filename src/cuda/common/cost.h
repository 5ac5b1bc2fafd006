// What the estimates of the GPU's candidates are made of. `heddle tune` measures it.
#pragma once

#include <array>
#include <string_view>

#include "problem/attention.h"

namespace heddle::cuda {

struct Cost {
  double fixed = 0;  // seconds of a call with next to nothing to compute
  double flops = 0;  // of products, a second, with every multiprocessor busy
  double bytes = 0;  // of keys and values read from memory, a second
};

struct CostLine {
  std::string_view name;
  Cost cost;
};
using CostTable = std::array<CostLine, 25>;

// On an H200.
const CostTable& measured_costs();

// Of one line of the table, such as "sm90 d128": as measured on an H200, or as the file says that HEDDLE_TUNING names,
// if it was made on such a GPU as the current one for this version. Throws Error if that file is none of `heddle tune`.
const Cost& cost_of(std::string_view line);

// Seconds of a forward with tiles of rows: each of the `tiles` takes as long as one of all its `tile_rows`, as many at
// a time as there are multiprocessors. Keys come no faster than to a kernel for few rows, whose cost is `decode`.
double tiles_seconds(const AttentionProblem& p, const Cost& cost, const Cost& decode, double tiles, int tile_rows);

}  // namespace heddle::cuda
