// How many clusters of CTAs a GPU holds at once.
#pragma once

#include <array>
#include <atomic>

#include "cuda/common/launch.cuh"

namespace heddle::cuda {

// Of one kernel. Asked once for each of the first devices and each size: the driver takes microseconds to answer.
class ClustersAtOnce {
 public:
  static constexpr int kMost = 16;  // CTAs of a cluster; more than eight is not portable, but every Hopper GPU has it

  // size: 1 to kMost; grid: the kernel's threads and memory.
  template <class... Parameters>
  int of(int size, std::string_view operation, void (*kernel)(Parameters...), Grid grid) {
    const auto device = static_cast<std::size_t>(current_device().ordinal);
    std::atomic<int> unknown = 0;
    std::atomic<int>& answer = device < known.size() ? known[device][static_cast<std::size_t>(size)] : unknown;
    if (answer == 0) {
      grid.blocks = grid.cluster = static_cast<unsigned>(size);
      answer = clusters_at_once(operation, kernel, grid) + 1;
    }
    return answer - 1;
  }

 private:
  std::array<std::array<std::atomic<int>, kMost + 1>, 16> known{};  // the answer and one more
};

}  // namespace heddle::cuda
