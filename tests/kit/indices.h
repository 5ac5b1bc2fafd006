// int32 tensors of given values.
#pragma once

#include <cstdint>
#include <vector>

#include "kit/host_tensor.h"

namespace heddle::kit {

inline HostTensor indices(const std::vector<std::int64_t>& values) {
  HostTensor out = HostTensor::input(DType::i32, {std::ssize(values)});
  for (std::int64_t n = 0; n < std::ssize(values); ++n) out.set(n, static_cast<double>(values[n]));
  return out;
}

}  // namespace heddle::kit
