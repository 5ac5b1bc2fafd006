// Rows of x in 8 bits for products in integers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace heddle {

// x[k] is taken to be q[k] * the result, the largest |x| being 127 of it; a row of zeros gives 0, one with a NaN or an
// infinity gives NaN.
inline float round_to_int8(const float* x, std::int64_t count, std::int8_t* q) {
  float largest = 0;
  bool finite = true;
  for (std::int64_t k = 0; k < count; ++k) {
    largest = std::max(largest, std::abs(x[k]));
    finite &= std::isfinite(x[k]);
  }
  const float scale = largest / 127.0f;
  for (std::int64_t k = 0; k < count; ++k) {
    const float quotient = finite && scale > 0 ? x[k] / scale : 0.0f;
    q[k] = static_cast<std::int8_t>(std::clamp(std::nearbyint(quotient), -127.0f, 127.0f));
  }
  return finite ? scale : std::nanf("");
}

}  // namespace heddle
