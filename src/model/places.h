// Parts of a workspace.
#pragma once

#include <cstddef>

namespace heddle {

// The least multiple of `step` that is not below `bytes`.
constexpr std::size_t aligned(std::size_t bytes, std::size_t step = 64) { return (bytes + step - 1) / step * step; }

// Gives out places, one behind the other, at multiples of `kStep` bytes.
template <std::size_t kStep>
class Places {
 public:
  std::size_t take(std::size_t bytes) {
    const std::size_t here = bytes_;
    bytes_ += aligned(bytes, kStep);
    return here;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_ = 0;
};
using CpuPlaces = Places<64>;
using GpuPlaces = Places<256>;

}  // namespace heddle
