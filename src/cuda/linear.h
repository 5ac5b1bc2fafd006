// What linear layers ask of the GPU beside their candidates.
#pragma once

#include "problem/linear.h"

namespace heddle::cuda {

// Seconds that the layer takes over weights in 16 bits, norm and activation included, estimated from the device alone;
// 0 where there is none.
double seconds_of_16bit(const LinearProblem& problem);

// Rows and columns of W.
struct WeightBlock {
  std::int64_t row = 0, column = 0, rows = 0, columns = 0;
};
// Writes a block of W as floats, on the stream. column: a multiple of 128.
void decode_weights(const LayerWeights& weights, const WeightBlock& block, const lowbit::Weights& out, void* stream);

}  // namespace heddle::cuda
