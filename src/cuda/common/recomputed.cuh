// Against values that a compiler keeps in registers which a kernel does not have.
#pragma once

namespace heddle::cuda {

// The same value, of which the compiler knows nothing: what is computed from it inside a loop is computed there in each
// step, not once in front of the loop and then kept. A few instructions are cheaper than a register.
__device__ inline int recomputed(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace heddle::cuda
