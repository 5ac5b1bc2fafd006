// Memory of a rank, kept from call to call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "heddle/runtime.h"

namespace heddle::distributed {

inline std::span<std::byte> bytes_at(const Workspace& memory, std::size_t bytes) {
  return {static_cast<std::byte*>(memory.data), bytes};
}

class Floats {
 public:
  std::span<float> get(std::int64_t count) {
    const auto numbers = static_cast<std::size_t>(count);
    return {static_cast<float*>(memory_.get(numbers * sizeof(float)).data), numbers};
  }
  std::span<float> filled(std::int64_t count, float value) {
    const std::span<float> out = get(count);
    std::ranges::fill(out, value);
    return out;
  }

 private:
  WorkspaceBuffer memory_;
};

}  // namespace heddle::distributed
