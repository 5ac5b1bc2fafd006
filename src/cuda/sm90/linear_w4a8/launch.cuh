// One instantiation.
#pragma once

#include <type_traits>

#include "cuda/common/elements.cuh"
#include "cuda/sm90/linear/launch.cuh"
#include "cuda/sm90/linear_w4a8/consumer.cuh"
#include "cuda/sm90/linear_w4a8/shared_consumer.cuh"
#include "cuda/sm90/linear_w4a8/variants.h"

namespace heddle::cuda::sm90::linear_w4a8 {

template <class C>
constexpr linear::Variant<typename C::WeightBlock> variant_of() {
  return linear::variant<C, std::conditional_t<(C::kDecoders > 0), SharedConsumer<C>, Consumer<C>>>();
}

template <DType kType, int kRow>
Variant Instance<kType, kRow>::variant() {
  constexpr Row row = kVariants[kRow];
  using T = ElementOf<kType>;
  return {row, kType, variant_of<Config<T, FragmentBlock8, row.tiles>>(),
          variant_of<Config<T, ScaledBlock8, row.tiles>>()};
}

}  // namespace heddle::cuda::sm90::linear_w4a8
