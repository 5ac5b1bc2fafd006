// What every benchmark program's main() does.
#pragma once

#include <benchmark/benchmark.h>

#include <exception>
#include <iostream>
#include <string>

#include "heddle/runtime.h"

namespace heddle::bench {

// Registers benchmarks by `add_all` and runs them, with what they ran on in the report. Returns main()'s result.
template <class AddAll>
int run(int argc, char** argv, const char* program, AddAll add_all) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  try {
    benchmark::AddCustomContext("heddle", version());
    benchmark::AddCustomContext("target", cpu_target());
    benchmark::AddCustomContext("threads", std::to_string(num_threads()));
    add_all();
    benchmark::RunSpecifiedBenchmarks();
  } catch (const std::exception& error) {
    std::cerr << program << ": " << error.what() << '\n';
    return 3;
  }
  benchmark::Shutdown();
  return 0;
}

}  // namespace heddle::bench
