// The fuzzer's bytes as choices. A zero byte, or none left, means "as it should be".
#pragma once

#include <cstddef>
#include <cstdint>

namespace heddle::fuzz {

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  bool empty() const { return at_ == size_; }
  std::uint8_t next() { return at_ < size_ ? data_[at_++] : 0; }
  // True once in `one_in` bytes; never for a zero byte.
  bool rarely(int one_in) { return next() % one_in == one_in - 1; }
  std::int64_t below(std::int64_t bound) { return next() % bound; }

 private:
  const std::uint8_t* data_;
  std::size_t size_, at_ = 0;
};

}  // namespace heddle::fuzz
