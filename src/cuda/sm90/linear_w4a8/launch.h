// The instantiations of the kernel.
#pragma once

#include "cuda/sm90/linear/launch.h"

namespace heddle::cuda::sm90::linear_w4a8 {

template <class Block>
using Variant = linear::Variant<Block>;

using lowbit::FragmentBlock8;
extern const Variant<FragmentBlock8> kBf16T64, kBf16T64R2, kBf16T128, kBf16T256;
extern const Variant<FragmentBlock8> kF16T64, kF16T64R2, kF16T128, kF16T256;

// Of nvfp4.
using lowbit::ScaledBlock8;
extern const Variant<ScaledBlock8> kBf16ScaledT64, kBf16ScaledT64R2, kBf16ScaledT128, kBf16ScaledT256;
extern const Variant<ScaledBlock8> kF16ScaledT64, kF16ScaledT64R2, kF16ScaledT128, kF16ScaledT256;

}  // namespace heddle::cuda::sm90::linear_w4a8
