// The GPU's side of src/distributed: memory that a rank keeps from call to call, and what moves numbers in it, in the
// order of a stream. In a build without CUDA all of it throws (src/stubs/cuda.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "heddle/tensor.h"
#include "problem/row_moves.h"

namespace heddle::cuda {

// Memory of the GPU that was current when this was made. Other GPUs of this process reach it, as NCCL has them do.
// Nothing waits on the host: who waits there for a GPU that waits for another rank may stop that rank, too.
class KeptMemory {
 public:
  KeptMemory();
  ~KeptMemory();
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;

  // Gives `old` back, null or some of this memory, once all that was put on `stream` is done, and takes `bytes` for
  // what is put there from now on. After a call that was captured `old` stays as long as this, since a graph may use
  // it. Throws RuntimeError, also by refuse_capture().
  void* replace(void* old, std::size_t bytes, void* stream);
  // Once all is done that was on a stream at its last end_of_call().
  void give_back(void* data) noexcept;
  // Nothing while the stream is captured: who replays a graph knows when it is done.
  void end_of_call(void* stream) noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Throws RuntimeError while the stream is captured: a graph would own what is taken.
void refuse_capture(std::size_t bytes, void* stream);

// A number of the capture that the stream is in, which no other has; 0: it is in none.
std::uint64_t capture_id(void* stream);

// From the host's memory, which may change once this returns; not while the stream is captured.
void write_to_gpu(void* to, const void* from, std::size_t bytes, void* stream);
// Waits for it.
void read_from_gpu(void* to, const void* from, std::size_t bytes, void* stream);
void copy_on_gpu(void* to, const void* from, std::size_t bytes, void* stream);

// Rows of so many bytes, each so many behind the one before; the host's part is done at once.
void copy_rows_on_gpu(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                      std::size_t rows, void* stream);

void fill_floats(float* x, std::int64_t count, float value, void* stream);
void add_floats(float* sum, const float* x, std::int64_t count, void* stream);

// Rows of [B, rows, H, D], rounded where dtypes differ; from is f32 then. add: f32 added to f32. No row of `to` is in
// two moves.
void move_rows(const TensorView& from, const TensorView& to, std::span<const RowMove> moves, bool add, void* stream);

// Where *failed, host memory that the GPU reads, is not 0 when the stream gets there, the GPU ends all that this
// process has on it, and later calls of CUDA return an error; else nothing.
void end_if(const int* failed, void* stream);

}  // namespace heddle::cuda
