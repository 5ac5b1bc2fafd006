// Grids that follow each other on a stream, each starting while the one before it ends (programmatic dependent launch,
// Grid::overlaps). Code of architectures before Hopper has none of it, on whatever GPU it runs: start() lets the stream
// order such kernels.
#pragma once

#include "cuda/common/ptx/barrier.cuh"

namespace heddle::cuda {

// Waits for the grids before this one: what they wrote can be read from here on. Every CTA must call it. A grid that
// has ended then has waited for those before it, so that waiting for the last grid is waiting for all.
__device__ inline void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  ptx::previous_grid_wait();
#endif
}

// Lets the next grid start: once all CTAs have called it or ended, CTAs of the next grid run where there is room.
__device__ inline void let_next_grid_start() {
#if __CUDA_ARCH__ >= 900
  ptx::next_grid_start();
#endif
}

}  // namespace heddle::cuda
