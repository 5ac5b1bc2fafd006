// What the rest of the library asks about the GPU side as a whole.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace heddle::cuda {

// Whether this build has the GPU kernels. Whether there is a GPU to run them is another question.
bool built();

struct Gpu {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  std::size_t memory = 0;  // bytes, all of it
};

// What this process sees; the current GPU is one of them.
struct Gpus {
  std::vector<Gpu> list;
  std::size_t current = 0;  // in the list
  std::string absence;      // not empty: why the list is
  int driver = 0,
      runtime = 0;  // CUDA's version that the driver serves, and that this build was made with: 13000 is 13.0
};
Gpus gpus();

// What became of the file that HEDDLE_TUNING names, in words; "" where it names none. Throws Error for a file that is
// none of `heddle tune`.
std::string tuning_state();

}  // namespace heddle::cuda
