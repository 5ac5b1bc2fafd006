// What the estimates of the GPU's candidates are made of. `heddle tune` measures it.
#pragma once

#include <array>
#include <string_view>

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
using CostTable = std::array<CostLine, 14>;

// On an H200.
const CostTable& measured_costs();

// Of one line of the table, such as "sm90 d128": as measured on an H200, or as the file says that HEDDLE_TUNING names.
// Throws Error if that file is none of `heddle tune`.
const Cost& cost_of(std::string_view line);

// Seconds for `tiles` pieces of `flops` each, a multiprocessor taking one after the other.
double tiled_seconds(const Cost& cost, double tiles, double flops);

}  // namespace heddle::cuda
