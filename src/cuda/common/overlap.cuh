// Grids that follow each other on a stream, each starting while the one before it ends (programmatic dependent launch,
// Grid::overlaps). Code of architectures before Hopper has none of it, on whatever GPU it runs: start() lets the stream
// order such kernels.
#pragma once

#include "cuda/common/ptx/barrier.cuh"

namespace heddle::cuda {

// What grids before this one wrote can be read from here on. Every CTA must come here: so a grid that has ended says
// that those before it have.
__device__ inline void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  ptx::previous_grid_wait();
#endif
}

// Once all CTAs have come here or ended, those of the next grid start where there is room.
__device__ inline void let_next_grid_start() {
#if __CUDA_ARCH__ >= 900
  ptx::next_grid_start();
#endif
}

}  // namespace heddle::cuda
