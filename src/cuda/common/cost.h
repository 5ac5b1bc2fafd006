// What the estimates of the GPU's candidates are made of, on the GPU at hand. Candidates bring their own lines
// (Kernel::costs).
#pragma once

#include <string_view>
#include <vector>

#include "problem/attention.h"
#include "problem/candidate.h"

namespace heddle::cuda {

struct NamedCost {
  std::string_view name;
  Cost cost;
};
using CostTable = std::vector<NamedCost>;
template <class Problem>
NamedCost named(const CostLine<Problem>& line) {
  return {line.name, line.cost};
}

// The lines of all candidates of cuda/kernels.h.
const CostTable& measured_costs();

// What stands in this line's place in the file that HEDDLE_TUNING names, if it was made on such a GPU as the current
// one for this version; else null. Throws Error if that file is none of `heddle tune`.
const Cost* tuned_cost(std::string_view line);

template <class Problem>
const Cost& cost_of(const CostLine<Problem>& line) {
  const Cost* const tuned = tuned_cost(line.name);
  return tuned != nullptr ? *tuned : line.cost;
}

// How many times as long the work takes that `line` shows as where the line was measured.
template <class Problem>
double times_as_long(const CostLine<Problem>& line) {
  const Cost& here = cost_of(line);
  return line.cost.bytes > 0 ? line.cost.bytes / here.bytes : line.cost.flops / here.flops;
}

// Seconds of a forward with tiles of rows: each of the `tiles` takes as long as one of all its `tile_rows`, as many at
// a time as there are multiprocessors. Keys come no faster than to a kernel for few rows, whose cost is `decode`.
double tiles_seconds(const AttentionProblem& p, const Cost& cost, const Cost& decode, double tiles, int tile_rows);

}  // namespace heddle::cuda
