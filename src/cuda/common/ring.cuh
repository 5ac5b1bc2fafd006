// A place in a ring of buffers that are filled and emptied again and again.
#pragma once

#include <cstdint>

namespace heddle::cuda {

// index: of the buffer. phase: the parity of its barriers' phases, which changes with each round. For rings whose size
// is known when the kernel runs:
struct DynamicRingPosition {
  int index = 0;
  std::uint32_t phase = 0;
  __device__ void next(int size) {
    if (++index == size) {
      index = 0;
      phase ^= 1;
    }
  }
};

// And when it is compiled.
template <int kSize>
struct RingPosition : DynamicRingPosition {
  __device__ void next() { DynamicRingPosition::next(kSize); }
};

}  // namespace heddle::cuda
