// Tensors that the command owns, and their conversions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "heddle/tensor.h"

namespace heddle::cli {

// A contiguous tensor in memory of its own, aligned to 64 bytes.
class HostTensor {
 public:
  HostTensor() = default;
  // Not initialised. Throws Error for more than kMaxRank extents, std::bad_alloc when the memory cannot be had.
  HostTensor(DType dtype, const std::vector<std::int64_t>& shape);

  const TensorView& view() const { return view_; }
  // Reads the memory in the order of the first index fastest (as Fortran lays it out).
  void reverse_strides();
  std::size_t bytes() const { return bytes_; }
  std::byte* data() const { return static_cast<std::byte*>(view_.data); }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t bytes_ = 0;
  TensorView view_;
};

// Views of tensors that are not there, to ask about a call on a device: contiguous, without data. Index data on a CPU
// is read, and has memory.
class StandIns {
 public:
  explicit StandIns(Device device) : device_(device) {}
  TensorView tensor(DType dtype, const std::vector<std::int64_t>& shape);
  // Of a view that has a shape and a dtype, or is not given.
  void place(TensorView& view);
  TensorView indices(const std::vector<std::int32_t>& values, const std::vector<std::int64_t>& shape);

 private:
  Device device_;
  std::vector<HostTensor> indices_;
};

// A contiguous copy of `from` (any strides), as `dtype`. Only floating-point dtypes convert; others must be equal.
HostTensor converted(const TensorView& from, DType dtype);

// Fills a floating-point tensor with normal numbers that depend on `seed` alone.
void fill_normal(const TensorView& view, unsigned seed);

// "f32", "float32", "f16", ... to a dtype; throws Error.
DType dtype_named(const std::string& name);

}  // namespace heddle::cli
