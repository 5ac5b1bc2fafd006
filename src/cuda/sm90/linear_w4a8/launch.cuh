// One instantiation.
#pragma once

#include "cuda/sm90/linear/launch.cuh"
#include "cuda/sm90/linear_w4a8/consumer.cuh"
#include "cuda/sm90/linear_w4a8/launch.h"

namespace heddle::cuda::sm90::linear_w4a8 {

template <class C>
constexpr Variant variant() {
  return linear::variant<C, Consumer<C>>();
}

}  // namespace heddle::cuda::sm90::linear_w4a8
