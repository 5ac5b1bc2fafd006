// How kernels are started.
#pragma once

#include <cstddef>
#include <string_view>
#include <type_traits>

#include "cuda/common/device.h"

namespace heddle::cuda {

// What a block may have.
constexpr std::size_t kAmpereSharedBytes = 99 * 1024;  // sm_86 and sm_89, the least of those that run code for sm_80
constexpr std::size_t kHopperSharedBytes = 227 * 1024;

struct Grid {
  unsigned blocks, threads;
  std::size_t shared_bytes = 0;  // dynamic
};

// Errors are those of `operation`. Nothing is started where there are no blocks.
template <class... Parameters>
void start(std::string_view operation, void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream,
           const std::type_identity_t<Parameters>&... parameters) {
  if (grid.blocks == 0) return;
  // More than 48 KB must be asked for, on each device; asking again is harmless and takes well under a microsecond.
  if (grid.shared_bytes > 0) {
    const int bytes = static_cast<int>(grid.shared_bytes);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), operation);
  }
  kernel<<<grid.blocks, grid.threads, grid.shared_bytes, stream>>>(parameters...);
  check(cudaGetLastError(), operation);
}

}  // namespace heddle::cuda
