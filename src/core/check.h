// Argument checks that speak: operation, tensor, value, rule.
#pragma once

#include <sstream>
#include <string>
#include <string_view>

#include "heddle/error.h"
#include "heddle/tensor.h"

namespace heddle {

// Joins anything that can be streamed; views print as their shape.
inline std::ostream& operator<<(std::ostream& out, const TensorView& view) { return out << view.shape_text(); }

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
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
