// Parts of a workspace.
#pragma once

#include <cstddef>
#include <cstdint>

namespace heddle {

// Sizes of a Transformer's rows, in elements of `element` bytes.
struct RowSizes {
  std::int64_t total = 0, hidden = 0, qkv = 0, intermediate = 0;
  std::size_t element = 2;
};

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
