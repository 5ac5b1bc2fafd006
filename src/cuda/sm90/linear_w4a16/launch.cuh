// One instantiation.
#pragma once

#include <type_traits>

#include "cuda/common/elements.cuh"
#include "cuda/sm90/linear/launch.cuh"
#include "cuda/sm90/linear_w4a16/variants.h"
#include "cuda/sm90/linear_w4a16/warp_consumer.cuh"
#include "cuda/sm90/linear_w4a16/warpgroup_consumer.cuh"

namespace heddle::cuda::sm90::linear_w4a16 {

template <DType kType, int kRow>
Variant Instance<kType, kRow>::variant() {
  constexpr Row row = kVariants[kRow];
  using C = Config<ElementOf<kType>, row.tiles>;
  using Consumer = std::conditional_t<C::kWarpgroups, WarpgroupConsumer<C>, WarpConsumer<C>>;
  return {row, linear::variant<C, Consumer>(), kType};
}

}  // namespace heddle::cuda::sm90::linear_w4a16
