#include "facts.h"

#include <exception>

#include "heddle/error.h"
#include "model/linear.h"
#include "output.h"

namespace heddle::cli {

std::string build_text() {
  return std::string("built by ") + HEDDLE_COMPILER + " (" + HEDDLE_BUILD_TYPE + ") for " + HEDDLE_SYSTEM;
}

std::string cuda_version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

std::string capability(const cuda::Gpu& gpu) { return std::to_string(gpu.major) + "." + std::to_string(gpu.minor); }

std::string gpu_text(const cuda::Gpu& gpu) {
  return gpu.name + ", compute capability " + capability(gpu) + ", " + std::to_string(gpu.multiprocessors) +
         " multiprocessors, " + bytes_text(static_cast<double>(gpu.memory));
}

MatrixLibraryFact matrix_library_fact() {
  try {
    return {matrix_library(), true};
  } catch (const RuntimeError& absence) {
    return {absence.what(), false};
  }
}

TuningFact tuning() {
  try {
    const std::string state = cuda::tuning_state();
    // The library has it in words alone.
    return {state, false, state.find(": used, made on ") != std::string::npos};
  } catch (const std::exception& error) {
    return {error.what(), true, false};
  }
}

}  // namespace heddle::cli
