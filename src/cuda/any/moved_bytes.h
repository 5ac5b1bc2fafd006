// Estimates of kernels that move bytes and compute little, of which there is one for each operation: what they take at
// least. Where nothing is compared, `heddle tune` measures nothing.
#pragma once

namespace heddle::cuda::any {

constexpr double kLaunch = 2e-6;    // seconds, about
constexpr double kCopied = 4.2e12;  // bytes a second, read and written, of a copy on an H200

inline double seconds_of_moving(double bytes, double rate = kCopied) { return kLaunch + bytes / rate; }

}  // namespace heddle::cuda::any
