// How `heddle bench` times a call, whatever the operation.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

#include "gpu.h"

namespace heddle::cli {

struct Timing {
  double median = 0, low = 0, high = 0;  // seconds; low and high are the 10th and 90th percentile
  int runs = 0;
};

// Calls for at least `seconds`, but at least 5 times, after one to warm up. `gpu` is null on the CPU.
Timing measure_call(const std::function<void()>& call, double seconds, const Gpu* gpu);

// --seconds of measure_call().
void add_seconds_flag(CLI::App& verb, double& seconds);

void add_bench_linear(CLI::App& bench);

}  // namespace heddle::cli
