// Argument checks that speak: operation, tensor, value, rule.
#pragma once

#include <concepts>
#include <cstdint>
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

// Whether a call's tensors have their data, or are only asked about before they do.
enum class Data : std::uint8_t { there, to_come };

// Checks of one operation's arguments. `require` throws Error "[operation] parts..." unless `condition` holds.
class Check {
 public:
  explicit Check(std::string_view operation, Data data = Data::there) : operation_(operation), data_(data) {}
  // The same operation's, for tensors that it does not read.
  Check without_data() const { return Check(operation_, Data::to_come); }

  template <class... Parts>
  void require(bool condition, const Parts&... parts) const {
    if (!condition) throw Error(text("[", operation_, "] ", parts...));
  }

  // `view` must be given, of that dtype, on `device`, which is that of `first`, and of that rank.
  void tensor(const TensorView& view, const char* name, DType dtype, Device device, int rank,
              const char* first = "q") const;
  // `view`, if it holds anything, has data, unless that is to come; extents are not negative; element offsets fit 63
  // bits.
  void addressable(const TensorView& view, const char* name) const;
  // `view`, index data, can be read where the host reads it: on the CPU, in questions too.
  void readable_indices(const TensorView& view, const char* name) const;
  // No two elements of an output share memory.
  void not_overlapping(const TensorView& view, const char* name) const;

 private:
  std::string_view operation_;
  Data data_;
};

// The bytes that the view's data is a multiple of, or will be: a power of two, at most 256.
int alignment_of(const TensorView& view);

}  // namespace heddle
