// How kernels are started.
#pragma once

#include <cstddef>
#include <string_view>
#include <type_traits>

#include "cuda/common/device.h"

namespace heddle::cuda {

struct Grid {
  unsigned blocks, threads;
  std::size_t shared_bytes = 0;  // dynamic
  unsigned cluster = 1;          // blocks that share a part of the chip, and read each other's shared memory
  bool overlaps = false;  // it may start while the grid before it ends, if its code then waits for that one's results
  bool cooperative = false;  // all of its blocks are on the chip at once, or none, and may wait for each other
};

// The grid as the runtime wants it, and the kernel made ready for it.
struct PreparedLaunch {
  cudaLaunchAttribute attributes[3] = {};
  cudaLaunchConfig_t config = {};

  template <class... Parameters>
  PreparedLaunch(std::string_view operation, void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream) {
    constexpr unsigned kPortableCluster = 8;
    config.gridDim = grid.blocks;
    config.blockDim = grid.threads;
    config.dynamicSmemBytes = grid.shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    const KernelFacts& facts = facts_of(reinterpret_cast<const void*>(kernel));
    if (grid.overlaps && facts.waits_for_previous_grid) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    if (grid.cluster > 1) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {grid.cluster, 1, 1};
    }
    if (grid.cooperative) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeCooperative;
      attribute.val.cooperative = 1;
    }
    // More than 48 KB, static memory included, and clusters of more than 8 must be allowed, on each device; that takes
    // well under a microsecond. What is allowed belongs to the kernel, not to the launch, and another thread may be
    // launching it with other memory: so all allow the same, the most there is.
    const auto set = [&](cudaFuncAttribute attribute, int value) {
      check(cudaFuncSetAttribute(kernel, attribute, value), operation);
    };
    if (grid.shared_bytes > 0) set(cudaFuncAttributeMaxDynamicSharedMemorySize, facts.most_dynamic_memory);
    if (grid.cluster > kPortableCluster) set(cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  PreparedLaunch(const PreparedLaunch&) = delete;  // config points to attributes
  PreparedLaunch& operator=(const PreparedLaunch&) = delete;
};

// Errors are those of `operation`. Nothing is started where there are no blocks.
template <class... Parameters>
void start(std::string_view operation, void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream,
           const std::type_identity_t<Parameters>&... parameters) {
  if (grid.blocks == 0) return;
  const PreparedLaunch launch(operation, kernel, grid, stream);
  check(cudaLaunchKernelEx(&launch.config, kernel, parameters...), operation);
}

// How many clusters of the grid's size the current GPU holds at once.
template <class... Parameters>
int clusters_at_once(std::string_view operation, void (*kernel)(Parameters...), const Grid& grid) {
  const PreparedLaunch launch(operation, kernel, grid, nullptr);
  int count = 0;
  check(cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config), operation);
  return count;
}

// How many blocks of such a size the current GPU holds at once, which is what a cooperative grid may have.
template <class... Parameters>
unsigned blocks_at_once(std::string_view operation, void (*kernel)(Parameters...), const Grid& grid) {
  const PreparedLaunch launch(operation, kernel, grid, nullptr);
  int count = 0;
  check(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, static_cast<int>(grid.threads), grid.shared_bytes),
      operation);
  return static_cast<unsigned>(count * current_device().multiprocessors);
}

}  // namespace heddle::cuda
