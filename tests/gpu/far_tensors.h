// Four-dimensional tensors whose elements lie further apart than 2^32, side by side in one piece of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ostream>

#include "kit/device_mirror.h"

namespace heddle::kit {

inline constexpr std::int64_t kReach = std::int64_t{1} << 32;  // elements
inline constexpr std::int64_t kB = 2, kRows = 70, kHeads = 3, kSize = 64;

// Up to eight tensors, spread over the same memory side by side: rows of 64 elements, strides so wide that the last row
// of each lies behind kReach elements.
struct Spread {
  const char* name;
  std::int64_t batch, row, head;  // strides in elements
};
inline void PrintTo(const Spread& spread, std::ostream* out) { *out << spread.name; }

inline constexpr std::int64_t kSlot = 4096;
inline const Spread kSpreads[] = {
    {"Batches", kReach + 64 * kSlot, kHeads* kSlot, kSlot},
    {"Rows", kSlot, kReach / (kRows - 1) / kSlot* kSlot + kSlot, kSlot / 4},
    {"Heads", 80 * kSlot, kSlot, kReach / 2 / kSlot* kSlot + 200 * kSlot},
};

inline TensorView spread_out(const DeviceMemory& memory, const Spread& spread, std::int64_t offset, DType dtype) {
  TensorView view(static_cast<std::byte*>(memory.data()) + offset * static_cast<std::int64_t>(size_of(dtype)), dtype,
                  {kB, kRows, kHeads, kSize}, {spread.batch, spread.row, spread.head, 1});
  view.device = Device::cuda;
  return view;
}

// Calls `copy(host row, byte offset in memory, bytes)` for each row of a tensor.
template <class Copy>
void each_row(const HostTensor& host, const TensorView& view, const DeviceMemory& memory, const Copy& copy) {
  const auto width = static_cast<std::int64_t>(size_of(view.dtype));
  const auto base = static_cast<const std::byte*>(view.data) - static_cast<const std::byte*>(memory.data());
  const TensorView& from = host.view();
  for (std::int64_t b = 0; b < kB; ++b) {
    for (std::int64_t i = 0; i < kRows; ++i) {
      for (std::int64_t h = 0; h < kHeads; ++h) {
        std::byte* row =
            static_cast<std::byte*>(from.data) + (b * from.stride[0] + i * from.stride[1] + h * from.stride[2]) * width;
        copy(row, base + (b * view.stride[0] + i * view.stride[1] + h * view.stride[2]) * width, kSize * width);
      }
    }
  }
}

// The memory that a spread's tensors lie in.
inline std::size_t bytes_of(const Spread& spread, DType dtype) {
  const std::int64_t last = (kB - 1) * spread.batch + (kRows - 1) * spread.row + (kHeads - 1) * spread.head;
  return static_cast<std::size_t>(last + 8 * kSize) * size_of(dtype);
}

}  // namespace heddle::kit
