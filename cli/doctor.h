// What `heddle doctor` looks at, one file a part.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/backend.h"
#include "problem.h"

namespace heddle::cli {

enum class Verdict : std::uint8_t { ok, note, problem };

struct Finding {
  std::string subject;
  Verdict verdict = Verdict::ok;
  std::string found;
  std::string advice = "";  // what to do, a sentence; where it is not ok
  Json more = nullptr;      // members of --json beside these, or null
};
using Findings = std::vector<Finding>;

// The build, the processor and its target, threads.
Findings examine_machine(const cuda::Gpus& seen);
// GPUs and what their kernels need: driver, cuBLASLt, the tuning file.
Findings examine_gpus(const cuda::Gpus& seen);
// HEDDLE_* variables that the others do not speak of.
Findings examine_settings();
// Typical calls: which candidate would run, on the CPU and on the current GPU if kernels run there.
Findings examine_calls(const cuda::Gpus& seen);

// Kernels are for Ampere (8.0) and later.
inline bool is_served(const cuda::Gpu& gpu) { return gpu.major >= 8; }
// The current GPU; null if there is none that is served.
inline const cuda::Gpu* served_gpu(const cuda::Gpus& seen) {
  return !seen.list.empty() && is_served(seen.list[seen.current]) ? &seen.list[seen.current] : nullptr;
}

// A variable of the environment; "" if it is not set.
std::string setting(const char* name);

}  // namespace heddle::cli
