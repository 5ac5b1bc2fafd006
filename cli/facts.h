// What `heddle info` and `heddle doctor` both say of a build and a machine.
#pragma once

#include <string>
#include <vector>

#include "cuda/backend.h"

namespace heddle::cli {

// "built by GNU 12.2.0 (Release) for Linux x86_64"
std::string build_text();

// 13000 -> "13.0"
std::string cuda_version(int number);
// "9.0"
std::string capability(const cuda::Gpu& gpu);
// "NVIDIA H200, compute capability 9.0, 132 multiprocessors, 139.81 GiB"
std::string gpu_text(const cuda::Gpu& gpu);

// What float layers on the CPU run by, which this loads: "oneDNN 2.6.3", or why there is none.
struct MatrixLibraryFact {
  std::string state;
  bool loaded = false;
};
MatrixLibraryFact matrix_library_fact();

// What became of the file that HEDDLE_TUNING names; a bad one is no reason to say nothing else.
struct TuningFact {
  std::string state;     // "" where it names none
  bool refused = false;  // it is no such file
  bool used = false;
};
TuningFact tuning();

}  // namespace heddle::cli
