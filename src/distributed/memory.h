// Where a rank's tensors lie, what is done there beside attention, and memory kept from call to call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "heddle/tensor.h"
#include "problem/row_moves.h"

namespace heddle::distributed {

// The host's memory, where all is done when a function returns, or a GPU's, where it is in the order of a stream. What
// ranks do is written once, over this.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual Device device() const = 0;
  // On a GPU, which is the current one: the stream from now on.
  virtual void use_stream(void* stream) = 0;
  // What was put on the stream so far may use memory that is given back later.
  virtual void end_of_call() noexcept = 0;

  // Memory for `bytes`; gives `old` back, which is null or such memory.
  virtual void* replace(void* old, std::size_t bytes) = 0;
  virtual void give_back(void* data) noexcept = 0;

  // From and to the host's memory, which is free once this returns.
  virtual void write(void* to, const void* from, std::size_t bytes) = 0;
  virtual void read(void* to, const void* from, std::size_t bytes) = 0;
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;
  virtual void fill(std::span<float> x, float value) = 0;
  virtual void add(std::span<float> sum, std::span<const float> x) = 0;
  // Rows of [B, rows, H, D], rounded where dtypes differ; from is f32 then.
  virtual void copy_rows(const TensorView& from, const TensorView& to, std::span<const RowMove> moves) = 0;
  // Adds them, f32.
  virtual void add_rows(const TensorView& from, const TensorView& to, std::span<const RowMove> moves) = 0;

  // Row n to row n, for the first `count`.
  void copy_rows(const TensorView& from, const TensorView& to, std::int64_t count) {
    const RowMove first{.count = count};
    copy_rows(from, to, {&first, 1});
  }
  TensorView view(const void* data, DType dtype, std::initializer_list<std::int64_t> shape) const {
    TensorView out(data, dtype, shape);
    out.device = device();
    return out;
  }
};

// Host: one for the process, by any thread. A GPU's is that of the current one, or throws RuntimeError.
Memory& host_memory();
std::unique_ptr<Memory> memory_on(Device device);

// Memory that only grows. It is aligned to 64 bytes.
class Buffer {
 public:
  explicit Buffer(Memory& memory) : memory_(memory) {}
  ~Buffer() {
    if (data_ != nullptr) memory_.give_back(data_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* get(std::size_t bytes) {
    if (bytes > bytes_) {
      bytes_ = 0;
      data_ = memory_.replace(std::exchange(data_, nullptr), bytes);
      bytes_ = bytes;
    }
    return static_cast<std::byte*>(data_);
  }
  TensorView get(DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView out = memory_.view(nullptr, dtype, shape);
    out.data = get(static_cast<std::size_t>(out.elements()) * size_of(dtype));
    return out;
  }

 private:
  Memory& memory_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

class Floats {
 public:
  explicit Floats(Memory& memory = host_memory()) : memory_(memory), buffer_(memory) {}
  std::span<float> get(std::int64_t count) {
    const auto numbers = static_cast<std::size_t>(count);
    return {reinterpret_cast<float*>(buffer_.get(numbers * sizeof(float))), numbers};
  }
  std::span<float> filled(std::int64_t count, float value) {
    const std::span<float> out = get(count);
    memory_.fill(out, value);
    return out;
  }

 private:
  Memory& memory_;
  Buffer buffer_;
};

}  // namespace heddle::distributed
