// Tensors of the tests of caches on the GPU, and comparison of all their memory.
#pragma once

#include <cstdlib>

#include "kit/device_mirror.h"
#include "unit/kv_cache_tensors.h"

namespace heddle::kv_cache_tests {

using kit::DeviceMemory;
using kit::DeviceStream;

// A tensor's memory on the GPU, guards and gaps included.
class Mirror {
 public:
  explicit Mirror(const Tensor& host) : Mirror(host.view(), host.bytes().data(), host.bytes().size()) {}
  // Of index data.
  explicit Mirror(const TensorView& view)
      : Mirror(view, static_cast<const std::byte*>(view.data), view.elements() * size_of(view.dtype)) {}

  const TensorView& view() const { return view_; }
  std::vector<std::byte> bytes() const {
    std::vector<std::byte> out(memory_.bytes());
    memory_.read(0, out.data(), out.size());
    return out;
  }

 private:
  Mirror(const TensorView& view, const std::byte* begin, std::size_t bytes) : view_(view) {
    if (!view.given()) return;
    memory_ = DeviceMemory(bytes);
    memory_.write(0, begin, bytes);
    view_.device = Device::cuda;
    view_.data = static_cast<std::byte*>(memory_.data()) + (static_cast<const std::byte*>(view.data) - begin);
  }

  DeviceMemory memory_;
  TensorView view_;
};

// Calls `operation(runtime)` on a stream and waits for it.
template <class Operation>
void on_stream(const Operation& operation) {
  const DeviceStream stream;
  Runtime runtime;
  runtime.stream = stream.get();
  operation(runtime);
  stream.synchronize();
}

// The place of a number among those of its dtype: neighbours differ by one.
inline std::int64_t place(const std::byte* at, DType dtype) {
  std::int64_t bits = 0;
  std::memcpy(&bits, at, size_of(dtype));
  const std::int64_t sign = std::int64_t{1} << (8 * size_of(dtype) - 1);
  return (bits & sign) != 0 ? sign - bits : bits;
}

// All memory, element by element, may differ by so many units in the last place.
inline void expect_equal(const std::vector<std::byte>& out, const std::vector<std::byte>& expected, DType dtype,
                         std::int64_t units, const char* name) {
  ASSERT_EQ(out.size(), expected.size());
  for (std::size_t n = 0; n < out.size(); n += size_of(dtype)) {
    const std::int64_t found = place(&out[n], dtype), wanted = place(&expected[n], dtype);
    ASSERT_LE(std::abs(found - wanted), units) << name << ", element " << n / size_of(dtype) << " of its memory";
  }
}

}  // namespace heddle::kv_cache_tests
