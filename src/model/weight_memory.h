// Memory that a model's weights stay in.
#pragma once

#include <cstddef>
#include <memory>

#include "heddle/tensor.h"

namespace heddle {

// Bytes of the CPU's or a GPU's memory, aligned to 64.
class WeightMemory {
 public:
  WeightMemory() = default;
  // Of the CPU, with anything in them.
  explicit WeightMemory(std::size_t bytes);
  // `count` numbers rounded to f32, f16 or bf16, on a device.
  WeightMemory(const float* values, std::size_t count, DType dtype, Device device);

  // To the current GPU; where the device is the CPU, nothing is done.
  void move_to(Device device);

  std::byte* data() const { return data_.get(); }
  std::size_t size() const { return size_; }

 private:
  struct Free {
    Device device;
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t size_ = 0;
};

}  // namespace heddle
