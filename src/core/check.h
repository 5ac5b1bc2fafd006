// Argument checks that speak: operation, tensor, value, rule.
#pragma once

#include <concepts>
#include <cstdio>
#include <string>
#include <string_view>

#include "heddle/error.h"
#include "heddle/tensor.h"

namespace heddle {

inline void append(std::string& out, std::string_view part) { out += part; }
inline void append(std::string& out, char part) { out += part; }
inline void append(std::string& out, std::integral auto part) { out += std::to_string(part); }
inline void append(std::string& out, double part) {
  char digits[32];
  out.append(digits, static_cast<std::size_t>(std::snprintf(digits, sizeof digits, "%g", part)));
}
inline void append(std::string& out, const TensorView& part) { out += part.shape_text(); }

// Joins strings, numbers and views, which print as their shape. Without a stream, whose making takes longer than all
// other checks of a call: candidates that refuse a call write their reasons into it.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::string out;
  (append(out, parts), ...);
  return out;
}

// Checks of one operation's arguments. `require` throws Error "[operation] parts..." unless `condition` holds.
class Check {
 public:
  explicit Check(std::string_view operation) : operation_(operation) {}

  template <class... Parts>
  void require(bool condition, const Parts&... parts) const {
    if (!condition) throw Error(text("[", operation_, "] ", parts...));
  }

  // `view` must be given, of that dtype, on `device`, which is that of `first`, and of that rank.
  void tensor(const TensorView& view, const char* name, DType dtype, Device device, int rank,
              const char* first = "q") const;
  // `view`, if it holds anything, has data; extents are not negative; element offsets fit 63 bits.
  void addressable(const TensorView& view, const char* name) const;
  // No two elements of an output share memory.
  void not_overlapping(const TensorView& view, const char* name) const;

 private:
  std::string_view operation_;
};

}  // namespace heddle
