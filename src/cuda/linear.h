// The GPU's candidates for linear layers. In a build without CUDA they are there and refuse (src/stubs/cuda.cc).
#pragma once

#include "problem/linear.h"

namespace heddle::cuda {

extern const LinearKernel kSm80Gemv;         // "sm80_gemv": the same for very few rows, from global memory to registers
extern const LinearKernel kSm80Linear;       // "sm80_linear": mma.sync, every format, from Ampere on
extern const LinearKernel kSm90LinearW4A16;  // "sm90_w4a16": wgmma, weights decoded in registers, for Hopper
extern const LinearKernel kSm90LinearW4A8;   // "sm90_w4a8": the same with products in e4m3
// cuBLASLt, which is loaded at run time:
extern const LinearKernel kCublasLtLinear;      // "cublaslt": W in 16 bits, kept or decoded before the product
extern const LinearKernel kCublasLtLinearW8A8;  // "cublaslt_w8a8": products in int8 or e4m3
extern const LinearBackwardKernel kCublasLtLinearBackward;  // "cublaslt"

// Seconds that the layer takes over weights in 16 bits, norm and activation included, estimated from the device alone;
// 0 where there is none.
double seconds_of_16bit(const LinearProblem& problem);

// Rows and columns of W.
struct WeightBlock {
  std::int64_t row = 0, column = 0, rows = 0, columns = 0;
};
// Writes a block of W as floats, on the stream. column: a multiple of 128.
void decode_weights(const LinearProblem& weights, const WeightBlock& block, const lowbit::Weights& out, void* stream);

}  // namespace heddle::cuda
