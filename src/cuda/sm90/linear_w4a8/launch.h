// The instantiations of the kernel.
#pragma once

#include "cuda/sm90/linear/launch.h"

namespace heddle::cuda::sm90::linear_w4a8 {

using Variant = linear::Variant<lowbit::FragmentBlock8>;

extern const Variant kBf16T64, kBf16T128, kBf16T256;
extern const Variant kF16T64, kF16T128, kF16T256;

}  // namespace heddle::cuda::sm90::linear_w4a8
