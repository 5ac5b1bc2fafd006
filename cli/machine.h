// Facts about the machine: processor, caches, memory, and the arithmetic it really reaches.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace heddle::cli {

struct Cache {
  int level = 0;
  std::string kind;  // "Data", "Instruction" or "Unified"
  std::int64_t bytes = 0;
};

struct Machine {
  std::string model;   // "unknown" if the system does not say
  int processors = 0;  // that this process may run on
  // Of so many processors' time a control group (a container) lets it have; 0 if there is no limit.
  double processor_time = 0;
  std::vector<Cache> caches;
  std::int64_t memory_total = 0, memory_available = 0;  // bytes; 0 if the system does not say
};

Machine machine();

// f32 fused multiply-adds per second, counted as two operations each, of `threads` threads with the widest vectors of
// this processor and no memory traffic: the best of several short runs.
double measured_peak_flops(int threads);

}  // namespace heddle::cli
