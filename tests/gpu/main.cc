// heddle_gpu_tests: fails where there is no GPU, so that a machine that lost its driver does not look healthy.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

#include "kit/device_mirror.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (::testing::GTEST_FLAG(list_tests)) return RUN_ALL_TESTS();
  const heddle::kit::Gpu gpu = heddle::kit::current_gpu();
  if (gpu.name.empty()) {
    const bool allowed = std::getenv("HEDDLE_ALLOW_NO_GPU") != nullptr;
    std::cerr << "heddle_gpu_tests: no test was run: " << gpu.absence << ".\n"
              << (allowed ? "HEDDLE_ALLOW_NO_GPU is set, so this is no failure.\n"
                          : "Set HEDDLE_ALLOW_NO_GPU for this to be no failure.\n");
    return allowed ? 0 : 1;
  }
  std::cout << gpu.name << ", compute capability " << gpu.major << '.' << gpu.minor << '\n';
  return RUN_ALL_TESTS();
}
