// What the estimates of the GPU's candidates are made of, on the GPU at hand. Candidates bring their own lines
// (Kernel::costs): of attention as `heddle tune` measured them on an H200; over lists of key blocks and of their choice
// as a profiler did on an H100; of linear layers, whose kernels bring seconds of each variant's units, what these
// amount to for the example.
#pragma once

#include <string_view>
#include <vector>

#include "problem/attention.h"
#include "problem/candidate.h"
#include "problem/linear.h"
#include "problem/select_blocks.h"
#include "problem/sparse.h"

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

// What stands in this line's place: by a CostOverride, or in the file that HEDDLE_TUNING names if it was made on such a
// GPU as the current one for this version; else null. Throws Error if that file is none of `heddle tune`.
const Cost* tuned_cost(std::string_view line);

// While one lives, this thread's estimates take `cost` for the line of that name, whatever GPU is here.
class CostOverride {
 public:
  CostOverride(std::string_view line, const Cost& cost);
  ~CostOverride();
  CostOverride(const CostOverride&) = delete;
  CostOverride& operator=(const CostOverride&) = delete;

 private:
  NamedCost cost_;
  const NamedCost* before_;
};

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

// What a rate is of: operations of products, and bytes of keys and values, or of weights, of a call.
struct Work {
  double flops = 0, bytes = 0;
};
Work work_of(const AttentionExample& call, Pass pass);
Work work_of(const LinearExample& call, Pass pass);
// Keys and values of all lists, one after the other: what moves by blocks and what moves by rows both grow as this
// does.
inline Work work_of(const SparseExample& call, Pass pass) {
  const double products = pass == Pass::forward ? 2 : 5;
  const auto keys = static_cast<double>(call.B * call.Hkv * call.lists() * call.entries * call.block_size);
  const auto rows = static_cast<double>(call.H / call.Hkv * call.query_rows), size = static_cast<double>(call.D);
  return {.flops = 2 * products * rows * keys * size,
          .bytes = 2 * keys * size * static_cast<double>(size_of(call.dtype))};
}
// Products with the half of pooled keys that positions see.
inline Work work_of(const SelectExample& call, Pass) {
  return {.flops = static_cast<double>(call.B * call.S * call.pooled()) * static_cast<double>(call.H * call.D)};
}
// In the unit of the line's rate.
template <class Problem>
double work_of(const CostLine<Problem>& line, const typename Problem::Example& call, Pass pass) {
  const Work work = work_of(call, pass);
  return line.cost.bytes > 0 ? work.bytes : work.flops;
}

// Seconds of a forward with tiles of rows: each of the `tiles` takes as long as one of all its `tile_rows`, as many at
// a time as there are multiprocessors. Keys come no faster than to a kernel for few rows, whose cost is `decode`.
double tiles_seconds(const AttentionProblem& p, const Cost& cost, const Cost& decode, double tiles, int tile_rows);

}  // namespace heddle::cuda
