// A worker's scratch memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/plan.h"

namespace heddle::cpu {

// Cuts one worker's scratch memory into 64-byte aligned arrays.
class Scratch {
 public:
  explicit Scratch(std::byte* at) : at_(at) {}
  template <class T>
  T* take(std::int64_t count) {
    T* p = reinterpret_cast<T*>(at_);
    used_ += round_up(count * static_cast<std::int64_t>(sizeof(T)), 64);
    if (at_ != nullptr) at_ += round_up(count * static_cast<std::int64_t>(sizeof(T)), 64);
    return p;
  }
  std::size_t used() const { return static_cast<std::size_t>(used_); }

 private:
  std::byte* at_;
  std::int64_t used_ = 0;
};

}  // namespace heddle::cpu
