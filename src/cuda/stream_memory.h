// Memory and the current GPU for callers whose arrays' library has neither asked for: in the order of a stream.
#pragma once

#include <cstddef>

namespace heddle::cuda {

// Makes `gpu` the calling thread's current GPU and returns the one before. Throws RuntimeError if there is no such GPU.
int exchange_current_gpu(int gpu);

// `bytes` on the current GPU, for what is started on `stream` from now on; given back in the same order, so that
// nothing waits. Throws RuntimeError.
void* take_memory(std::size_t bytes, void* stream);
void give_memory_back(void* memory, void* stream) noexcept;

}  // namespace heddle::cuda
