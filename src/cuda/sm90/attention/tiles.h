// Sizes that all kernels of Hopper's forward share, for host and device.
#pragma once

namespace heddle::cuda::sm90::attention {

constexpr int kRows = 64;   // of a warpgroup: the M of wgmma
constexpr int kPanel = 64;  // 16-bit elements in a row of the 128-byte swizzle

}  // namespace heddle::cuda::sm90::attention
