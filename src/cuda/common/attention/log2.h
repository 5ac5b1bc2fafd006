// Attention counts exponents in base 2, which the GPU's exponential takes. For host and device.
#pragma once

namespace heddle::cuda {

constexpr float kLog2e = 1.44269504088896341f;  // exp(x) = 2^(kLog2e x)
constexpr float kLn2 = 0.693147180559945309f;

// The largest score that a row has met grows from key tile to key tile, and what was summed so far is relative to it. A
// kernel rescales those sums only when the maximum has grown by more than this, in log2: until then an exponential may
// reach 2^8, which float32 sums and 16-bit floats hold as exactly as numbers below 1. (The conditional rescaling of
// FlashAttention-4.)
constexpr float kRescaleLog2 = 8;

}  // namespace heddle::cuda
