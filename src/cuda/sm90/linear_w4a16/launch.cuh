// One instantiation.
#pragma once

#include <type_traits>

#include "cuda/sm90/linear/launch.cuh"
#include "cuda/sm90/linear_w4a16/launch.h"
#include "cuda/sm90/linear_w4a16/warp_consumer.cuh"
#include "cuda/sm90/linear_w4a16/warpgroup_consumer.cuh"

namespace heddle::cuda::sm90::linear_w4a16 {

template <class C>
constexpr Variant variant() {
  return linear::variant<C, std::conditional_t<C::kWarpgroups, WarpgroupConsumer<C>, WarpConsumer<C>>>();
}

}  // namespace heddle::cuda::sm90::linear_w4a16
