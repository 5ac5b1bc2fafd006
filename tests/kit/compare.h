// The accuracy rule and the comparison behind every verdict.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kit/yardstick.h"

namespace heddle::kit {

// Allowed multiples of the plain computation's error.
constexpr double kFactor = 2;
constexpr double kSoftcapGradientFactor = 3;
// Under Precision::tf32 a kernel may round operands to 2/3 of the last place, where the plain computation has 1/2.
constexpr double kTf32Factor = kFactor * 4 / 3;

// What is allowed beside a multiple of the plain computation's error, since that error may be 0 by luck or by
// construction (one key: P = 1 exactly), where a tiled computation in the same precision still rounds. With u the unit
// roundoff (f32 2^-24, f16 2^-11, bf16 2^-9):
//   4 u_f32 * terms   any order of summation in f32, and lse kept in f32 between forward and backward: sums of
//                     |terms|, times the condition of the softmax's scores; f8e4m3 operands: 2^-13 for u_f32, as
//                     Hopper's tensor cores keep 14 bits of such sums
//   u * max|result|   rounding of a 16-bit result
//   2 u * delta       16-bit backward: delta = dO . O takes O as rounded by the forward; errors of rows are independent
//   3 u_tf32 * max|result|   Precision::tf32 (u 2^-11): a product alone, whose operands a kernel may round to 2/3 of
//   the
//                     last place instead of 1/2, each in its own direction
//   4 u_tf32 * delta  backward under Precision::tf32: dP = dO . V is such a product, delta = dO . O is not
//   2^-24             f16: half-way rounding of subnormal results and probabilities
// `dtype` is the result's, `operands` that of q.
double floor_of(const PlainTensor& plain, std::span<const double> reference, DType dtype, DType operands);

// max|out - reference| <= factor * max|plain - reference| + floor. NaN fails; where the reference is infinite or NaN
// the output must be the same, and the other way round.
struct Comparison {
  std::string tensor;
  double error = 0, plain_error = 0, floor = 0, bound = 0;
  std::int64_t compared = 0;
  bool passed = false;
  std::string worst;  // coordinate and values of the worst element
};

Comparison compare(const std::string& tensor, std::span<const double> out, std::span<const double> reference,
                   const PlainTensor& plain, const std::vector<std::int64_t>& shape, DType dtype, DType operands,
                   double factor);

}  // namespace heddle::kit
