// A short number that stands for many.
#pragma once

#include <cstdint>
#include <string_view>

namespace heddle {

// FNV-1a over 64-bit words.
class Digest {
 public:
  template <class... Words>
  void add(Words... words) {
    (add_word(static_cast<std::uint64_t>(words)), ...);
  }
  void add_text(std::string_view text) {
    add(text.size());
    for (const char c : text) add(static_cast<unsigned char>(c));
  }
  std::uint64_t value() const { return value_; }

 private:
  void add_word(std::uint64_t word) {
    for (int n = 0; n < 8; ++n) {
      value_ = (value_ ^ (word & 0xff)) * 0x100000001b3u;
      word >>= 8;
    }
  }
  std::uint64_t value_ = 0xcbf29ce484222325u;
};

}  // namespace heddle
