// Owning test tensors in memory that betrays misuse: every slot that holds no value is NaN, and outputs stand between
// guard zones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "heddle/tensor.h"

namespace heddle::kit {

// How a tensor lies in memory. A [batch, row, head, dim] tensor is viewed the same way in all of them.
enum class Layout : std::uint8_t {
  contiguous,
  heads_first,  // stored [batch, head, row, dim]
  padded_rows,  // gaps behind each [dim] and behind each [head, dim]; data starts one element off alignment
  strided_dim,  // neighbours in dim are 3 elements apart
  reversed,     // rows and dims run backwards (negative strides); only for tensors that are read
  expanded,     // all batches and heads share one [row, dim] (stride 0); only for tensors that are read
};

class HostTensor {
 public:
  HostTensor() = default;
  HostTensor(HostTensor&&) = default;
  HostTensor& operator=(HostTensor&&) = default;
  // A copy has memory of its own, and a view of that.
  HostTensor(const HostTensor& other) : memory_(other.memory_), view_(other.view_) { rebase(other); }
  HostTensor& operator=(const HostTensor& other) { return *this = HostTensor(other); }
  // Uninitialised values: every 16-bit half of the memory is 0xFFA5 (f8e4m3: 0xFFFF), a NaN of its dtype. An input ends
  // where its memory ends, so that a sanitizer sees reads past it; an output has `guard` elements on both sides.
  static HostTensor input(DType dtype, std::vector<std::int64_t> shape, Layout layout = Layout::contiguous);
  static HostTensor output(DType dtype, std::vector<std::int64_t> shape, Layout layout = Layout::contiguous);

  const TensorView& view() const { return view_; }
  bool given() const { return view_.given(); }

  // Element at natural (row-major) index of the shape.
  double get(std::int64_t natural) const;
  void set(std::int64_t natural, double value);
  // Natural order. Boolean and i32 elements are converted.
  std::vector<double> values() const;
  std::int64_t elements() const { return view_.elements(); }

  // All of it: elements, gaps and guards.
  std::span<const std::byte> memory() const { return memory_; }
  std::span<std::byte> memory() { return memory_; }

  // Same memory, bit for bit, elements and poison.
  bool same_bits(const HostTensor& other) const { return memory_ == other.memory_; }

  // Empty if all memory that is not an element still holds the poison; else where the first changed byte lies.
  std::string damage() const;

 private:
  static HostTensor make(DType dtype, const std::vector<std::int64_t>& shape, Layout layout, std::int64_t guard);
  std::int64_t offset(std::int64_t natural) const;
  void rebase(const HostTensor& other) {
    if (!given()) return;
    view_.data = memory_.data() + (static_cast<const std::byte*>(other.view_.data) - other.memory_.data());
  }

  std::vector<std::byte> memory_;
  TensorView view_;
};

// Rounds to the dtype and back.
double rounded(double value, DType dtype);

}  // namespace heddle::kit
