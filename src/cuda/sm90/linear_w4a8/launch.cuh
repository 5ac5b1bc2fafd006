// One instantiation.
#pragma once

#include "cuda/sm90/linear/launch.cuh"
#include "cuda/sm90/linear_w4a8/consumer.cuh"
#include "cuda/sm90/linear_w4a8/launch.h"
#include "cuda/sm90/linear_w4a8/shared_consumer.cuh"

namespace heddle::cuda::sm90::linear_w4a8 {

template <class C>
constexpr Variant<typename C::WeightBlock> variant() {
  using Multiplier = std::conditional_t<(C::kDecoders > 0), SharedConsumer<C>, Consumer<C>>;
  return linear::variant<C, Multiplier>();
}

}  // namespace heddle::cuda::sm90::linear_w4a8
