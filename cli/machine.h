// Facts about the machine: processor, caches, memory, and the arithmetic it really reaches.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/os/os.h"

namespace heddle::cli {

struct Machine {
  std::string model;   // "unknown" if the system does not say
  int processors = 0;  // that this process may run on
  // Of so many processors' time a control group (a container) lets it have; 0 if there is no limit.
  double processor_time = 0;
  std::vector<os::Cache> caches;
  os::Memory memory;
};

Machine machine();

// f32 fused multiply-adds per second, counted as two operations each, of `threads` threads with the widest vectors of
// this processor and no memory traffic: the best of several short runs.
double measured_peak_flops(int threads);

}  // namespace heddle::cli
