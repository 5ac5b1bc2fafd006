// The instantiations of the kernel.
#pragma once

#include "cuda/sm90/linear/launch.h"

namespace heddle::cuda::sm90::linear_w4a16 {

using Variant = linear::Variant<lowbit::FragmentBlock>;

extern const Variant kBf16T8, kBf16T16, kBf16T32, kBf16T32R2, kBf16T64, kBf16T64R2, kBf16T128R2, kBf16T128R3, kBf16T256;
extern const Variant kF16T8, kF16T16, kF16T32, kF16T32R2, kF16T64, kF16T64R2, kF16T128R2, kF16T128R3, kF16T256;

}  // namespace heddle::cuda::sm90::linear_w4a16
